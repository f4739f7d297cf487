"""What hook and sidecar agree on: schema, layout of the shared volume, names, checksums.

The hook imports this at once, so it must stay light: standard library, pydantic and awscrt.
"""
