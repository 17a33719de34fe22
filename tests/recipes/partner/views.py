# views.py
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect

from partner.models import PanelMember
from sampling_async.matching import Member


async def go(request: HttpRequest) -> HttpResponse:
    code = request.headers["X-Member"]  # set by your gateway; use request.user where you have one
    router = request.scope["state"]["router"]
    member = await PanelMember.objects.aget(pk=code)
    profile = {int(question): answer for question, answer in member.answers.items()}
    route = await router.route(Member(code, profile), within=2.0)
    if route.url is None:
        return HttpResponse(route.status.text, status=404 if route.status == "none_open" else 503)
    await route.entered()
    return HttpResponseRedirect(route.url)
