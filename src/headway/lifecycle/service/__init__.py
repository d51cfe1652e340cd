"""The data service: data sets of a store over HTTP, with uploads that survive cut connections and killed servers.

`server.py` starts it, `app.py` lists its resources, `uploads.py` keeps the bytes of bodies, `requests.py` makes a
version of a complete body. `client.py` is the other end.
"""
