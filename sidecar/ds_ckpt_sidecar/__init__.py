"""The sidecar: one process that makes saves durable, and the ds-ckpt command."""
