"""HTTP: what both servers of Headway share: sockets, connections within limits, forms, refusals.

In: an ASGI application, an address and limits. Out: its answers over HTTP/1.1, by uvicorn's parser.

Open `connection.py` first: the phases of a connection, and how long each may take. `listening.py` binds an address,
watches signals and drains; `multipart.py` parses forms; `problems.py` is an answer that refuses (RFC 9457).
"""
