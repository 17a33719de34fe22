// Code and tables that are wider than the page can be scrolled with the keyboard; both sidebars have a name; arguments
// in a signature of several lines, which Sphinx writes as definitions without terms, are plain text.
addEventListener("DOMContentLoaded", () => {
  for (const wide of document.querySelectorAll("pre, .table-wrapper")) wide.tabIndex = 0;
  document.querySelector("aside.sidebar-drawer")?.setAttribute("aria-label", "All pages");
  document.querySelector("aside.toc-drawer")?.setAttribute("aria-label", "This page");
  for (const definitions of document.querySelectorAll("dt.sig dl")) definitions.role = "presentation";
});
