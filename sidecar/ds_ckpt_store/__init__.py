"""The library below hook and sidecar: contract, stores, transfer, catalog, restore.

Importing this package imports nothing else; each module brings what it needs.
"""
