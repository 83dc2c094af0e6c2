"""`/dspark/`: the status page, three small files and an icon that the server has in memory.

The shell holds no data and needs no key. Its script asks `/dspark/status` with the key that a person types in, and
keeps that key nowhere but in its own memory. Nothing comes from another host, and the content security policy lets
nothing come from there: the page works on a machine without a network.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Response
from fastapi.responses import RedirectResponse

HERE = Path(__file__).parent

ASSETS = {
    "/dspark/": ("index.html", "text/html; charset=utf-8"),
    "/dspark/style.css": ("style.css", "text/css; charset=utf-8"),
    "/dspark/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/dspark/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""Path -> file and its content type."""

CONTENT_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)

HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Another version of the server may answer next time.
    "Cache-Control": "no-cache",
}


def page_routes() -> APIRouter:
    """The routes of the page; they are no API and not in its description."""
    router = APIRouter(include_in_schema=False)

    @router.get("/dspark")
    async def to_the_page() -> Response:
        # Relative, for a proxy that serves this under a path of its own.
        return RedirectResponse("dspark/", headers={"Referrer-Policy": "no-referrer"})

    for path, (name, content_type) in ASSETS.items():
        _add_asset(router, path, (HERE / name).read_bytes(), content_type)
    return router


def _add_asset(router: APIRouter, path: str, content: bytes, content_type: str) -> None:
    async def asset() -> Response:
        return Response(content, headers=HEADERS | {"Content-Type": content_type})

    router.add_api_route(path, asset, methods=["GET"])
