"""The dashboard's pages: a form for people, its parts, a stream of what happens, each job's story. Read-only.

The form and its parts say nothing of jobs and are open to all; what fills the form needs a token where the
other pages need one. Nothing is fetched from anywhere else: the policy in the headers forbids it.
"""

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from coslice.observe.board import Board
from coslice.observe.events import EventStream
from coslice.observe.pages import asset
from coslice.orchestrator.live import MAX_VIEWERS, Live

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
FORM = {
    "/": ("dashboard.html", "text/html"),
    "/dashboard/drawing.js": ("drawing.js", "text/javascript"),
    "/dashboard/drawing.css": ("drawing.css", "text/css"),
    "/dashboard/dashboard.js": ("dashboard.js", "text/javascript"),
    "/dashboard/feed.js": ("feed.js", "text/javascript"),
    "/dashboard/dashboard.css": ("dashboard.css", "text/css"),
}
EVENTS, STORY = "/dashboard/events", "/dashboard/story"


def add(board: Board, live: Live) -> None:
    for path in FORM:
        board.routes.append(Route(path, _form, methods=["GET"]))
    board.open.update(FORM)

    async def events(_: Request) -> Response:
        if live.viewers >= MAX_VIEWERS:
            text = f"{MAX_VIEWERS} others look already; close one, or use `coslice top`\n"
            return PlainTextResponse(text, 503, HEADERS)
        return EventStream(live.follow(), HEADERS)

    async def story(request: Request) -> Response:
        group, job = (request.query_params.get(name, "") for name in ("group", "job"))
        if (term := live.source) is None:
            return _no(503, "this orchestrator stands by: another leads")
        lock = term.groups.get(group)
        if lock is None:
            return _no(404, f"there is no group {group[:200]}")
        lines = term.story(lock, job)
        if lines is None:
            return _no(404, f"group {group} knows no job {job[:200]}: it never asked, or is over")
        return JSONResponse({"group": group, "job": job, "lines": lines}, headers=HEADERS)

    board.routes += [Route(EVENTS, events, methods=["GET"]), Route(STORY, story, methods=["GET"])]


def _no(status: int, why: str) -> Response:
    return JSONResponse({"lines": [], "error": why}, status, HEADERS)


async def _form(request: Request) -> Response:
    name, kind = FORM[request.url.path]
    return Response(asset(name), media_type=kind, headers=HEADERS)
