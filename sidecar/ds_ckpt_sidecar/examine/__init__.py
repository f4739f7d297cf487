"""What ``ds-ckpt doctor`` looks at: the volume, its files, the store, the bucket's rules.

Each module returns findings and prints nothing. They look at the system as it is, and not through
``Filesystem``: what counts is what the kernel lets this very process do.
"""
