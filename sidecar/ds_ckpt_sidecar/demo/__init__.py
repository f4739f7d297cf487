"""``ds-ckpt demo``: the whole main job on one machine, real parts in processes of their own."""
