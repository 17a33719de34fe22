"""The style sheet of a campaign's report."""

from typing import Final

STYLE: Final = """\
:root { color-scheme: light dark;
  --ground: #ffffff; --sheet: #f4f6fa; --edge: #c9d1dc; --text: #1c2430; --soft: #4f5b6d; --track: #e3e8f0;
  --invited: #0b7a55; --rejected: #b45309; --not_sent: #c0261e; --unknown: #7a3fa0; --skipped: #3f4c5e;
  --pending: #7c8aa0; --line: #2458b8; --outage: #c0261e; --paused: #4f5b6d; --hours: #2458b8;
  --rate: #a16207; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ground: #14181f; --sheet: #1c222c; --edge: #3b4554; --text: #e8ecf2; --soft: #b0bac9;
    --track: #2b3441; --invited: #4fd1a0; --rejected: #f0a04b; --not_sent: #ff7f76; --unknown: #cf9bf0;
    --skipped: #c3cedd; --pending: #74839a; --line: #8ab4ff; --outage: #ff7f76; --paused: #b0bac9;
    --hours: #8ab4ff; --rate: #e6bd5c; }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { margin: 0; background: var(--ground); color: var(--text); overflow-wrap: anywhere;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.25rem; line-height: 1.3; margin: 2.75rem 0 .75rem; padding-top: 1rem;
  border-top: 1px solid var(--edge); }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
p { margin: .5rem 0; max-width: 50rem; }
.soft, footer, figcaption small, dd small { color: var(--soft); }
.state { display: inline-block; margin: 0 .5rem .25rem 0; padding: .1rem .7rem; border: 2px solid var(--mark);
  border-radius: 1rem; font-weight: 600; }
.planned { --mark: var(--soft); } .running { --mark: var(--line); } .finished { --mark: var(--invited); }
.state.paused { --mark: var(--rate); } .stopped { --mark: var(--not_sent); }
dl { margin: 1rem 0; display: grid; gap: .75rem; }
dt { color: var(--soft); font-size: .875rem; }
dd { margin: 0; }
dd small { display: block; font-size: .8125rem; font-weight: 400; }
.times { grid-template-columns: repeat(auto-fill, minmax(min(100%, 13rem), 1fr)); gap: .5rem 1rem; }
.figures { grid-template-columns: repeat(auto-fit, minmax(min(100%, 9.5rem), 1fr)); }
.figures > div { background: var(--sheet); border: 1px solid var(--edge); border-radius: .5rem;
  padding: .75rem; }
.figures dd { font-size: 1.375rem; line-height: 1.3; font-weight: 600; font-variant-numeric: tabular-nums; }
.limits { grid-template-columns: repeat(auto-fill, minmax(min(100%, 16rem), 1fr)); gap: .5rem 1rem; }
figure { margin: 1.25rem 0; }
figcaption { font-weight: 600; margin-bottom: .25rem; }
figcaption small { display: block; font-weight: 400; font-size: .875rem; }
.key { list-style: none; margin: .5rem 0; padding: 0; display: flex; flex-wrap: wrap; gap: .25rem 1.25rem;
  font-size: .875rem; }
.swatch { width: 14px; height: 14px; margin-right: .4rem; vertical-align: -2px; }
.line { width: 24px; }
.scroll { position: relative; overflow-x: auto; margin: .75rem 0; background:
  linear-gradient(to right, var(--ground) 40%, transparent) left / 3rem 100% no-repeat local,
  linear-gradient(to left, var(--ground) 40%, transparent) right / 3rem 100% no-repeat local,
  linear-gradient(to right, var(--edge), transparent) left / 1rem 100% no-repeat scroll,
  linear-gradient(to left, var(--edge), transparent) right / 1rem 100% no-repeat scroll; }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 0 2.5rem; }
.codes .b { width: 14%; }
.codes .w:nth-child(2) { min-width: 13rem; }
.scroll:focus-visible, summary:focus-visible { outline: 3px solid var(--line); outline-offset: 2px; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; overflow-wrap: normal; }
caption { text-align: left; color: var(--soft); padding-bottom: .25rem; }
th, td { text-align: left; vertical-align: top; padding: .4rem .75rem .4rem 0;
  border-bottom: 1px solid var(--edge); }
thead th { color: var(--soft); vertical-align: bottom; }
tbody th { font-weight: 400; }
tfoot th, tfoot td { font-weight: 600; }
.n, td { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.b, .w, .x, .t { text-align: left; white-space: normal; }
.b { min-width: 4.5rem; }
.w { min-width: 9rem; overflow-wrap: anywhere; }
.x { min-width: 13rem; overflow-wrap: anywhere; }
.t { white-space: nowrap; }
.b svg { display: block; width: 100%; height: 10px; margin-top: .4rem; background: var(--track); }
.b { width: 22%; }
.b rect { height: 10px; }
.account { display: block; width: 100%; height: 34px; background: var(--track); }
.account rect { height: 34px; stroke: var(--ground); }
.plot { padding: 0 22px 0 46px; }
.chart { display: block; width: 100%; overflow: visible; }
.chart svg { overflow: visible; }
.chart text, .chart tspan { font-size: 12px; fill: var(--soft); }
.chart .strong { fill: var(--text); }
.chart line { stroke: var(--edge); }
.chart .axis { stroke: var(--soft); }
.chart path { vector-effect: non-scaling-stroke; }
.areas path { shape-rendering: crispEdges; }
.curve { fill: none; stroke-width: 2; }
.dashed { stroke-dasharray: 5 3; }
.end { text-anchor: end; } .middle { text-anchor: middle; }
.f-invited { fill: var(--invited); } .f-rejected { fill: var(--rejected); }
.f-not_sent { fill: var(--not_sent); }
.f-unknown { fill: var(--unknown); } .f-skipped { fill: var(--skipped); } .f-pending { fill: var(--pending); }
.f-line { fill: var(--line); }
.s-line { stroke: var(--line); } .s-unknown { stroke: var(--unknown); }
.f-outage { fill: var(--outage); } .f-paused { fill: var(--paused); }
.f-hours { fill: var(--hours); } .f-rate { fill: var(--rate); }
details { margin: 1rem 0; }
summary { cursor: pointer; font-weight: 600; padding: .4rem 0; }
footer { margin-top: 3rem; padding-top: 1rem; border-top: 1px solid var(--edge); font-size: .875rem; }
.on-paper { display: none; }
.unseen { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
@media screen and (max-width: 640px) {
  .codes, .codes caption, .codes tbody { display: block; }
  .codes thead tr { display: none; }
  .codes tbody tr { display: grid; grid-template-columns: 3rem 1fr auto auto; padding: .4rem 0;
    border-bottom: 1px solid var(--edge); }
  .codes th, .codes td { border: 0; padding: .1rem .75rem .1rem 0; width: auto; min-width: 0;
    text-align: left; }
  .codes .w:nth-child(2) { min-width: 0; }
  .codes .b, .codes .w ~ .w, .codes .x { grid-column: 2 / -1; width: auto; }
  .codes .w ~ .w::before { content: "The campaign: "; color: var(--soft); }
  .codes .x::before { content: "You: "; color: var(--soft); }
}
@media print {
  @page { margin: 14mm; }
  :root { color-scheme: light; --text: #000000; --soft: #333333; }
  html, body { background: #ffffff; }
  body { font-size: 10pt; -webkit-print-color-adjust: exact; print-color-adjust: exact; }
  main { max-width: none; padding: 0; }
  h2 { margin-top: 1.5rem; }
  h1, h2, h3, caption, figcaption { break-after: avoid; }
  tr, figure, .figures > div { break-inside: avoid; }
  thead { display: table-header-group; }
  tfoot { display: table-row-group; }
  .scroll { overflow: visible; background: none; }
  table { font-size: 8pt; }
  .b, .w, .x { min-width: 0; }
  .t { white-space: normal; }
  .b, .codes .b { width: 14%; }
  th, td { padding: .2rem .5rem .2rem 0; }
  .b svg { margin-top: .2rem; }
  .codes .w:nth-child(2) { min-width: 10rem; }
  .figures { grid-template-columns: repeat(5, 1fr); }
  .figures > div { padding: .5rem; }
  .figures dd { font-size: .9375rem; }
  footer { margin-top: 1rem; }
  details { display: none; }
  .on-paper { display: block; }
}
"""
