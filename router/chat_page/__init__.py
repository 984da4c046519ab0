"""The chat page at ``/``: files in ``page/``, served unchanged. It uses the API as any other client does.

Colours, icon and helpers of ``_SHARED`` are those of the dashboard's page. Libraries of other projects are in
``page/vendor/``.
"""

from __future__ import annotations

from router.page_files import read_page

_SHARED = ("colors.css", "dom.js", "format.js", "icon.svg")

_DASHBOARD = read_page("router.dashboard", "/dashboard", "/chat")
PAGE = {f"/chat/{name}": _DASHBOARD[f"/chat/{name}"] for name in _SHARED}
# Images of messages are data: URLs, which load nothing from elsewhere.
PAGE |= read_page("router.chat_page", "/", "/chat", sanitizer="dompurify", images="'self' data:")
