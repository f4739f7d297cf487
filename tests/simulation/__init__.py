"""A deterministic simulation of whole training jobs: the real code in an invented world.

One run is made from one seed. In it several nodes train, save, die, come back and restore, over a
clock, an object store, volumes and threads that are simulated; hook, agent, lifecycle, catalog,
journal, transfer, retention, collector and restore are the real ones. ``make simulate`` runs many.

=============  ==================================================================================
``kernel``     time, processes and their threads (greenlets), and dying at any call
``chance``     every decision of chance by name, so that a run can be repeated without some of them
``seams``      all that is swapped in the real modules, in one place
``disk``       the volume: names in memory, bytes in memory files, with real descriptors
``cloud``      the store: answers lost, late, doubled, refused, cut or changed
``trainer``    a training process: the real hook under an engine that writes DeepSpeed's names
``pods``       what a process does: agent, trainer, restore, gc
``story``      a training job and the hand that disturbs it
``checker``    the invariants, from what store and volumes show
``run``        one run, from its seed to its outcome
``campaign``   many runs on all cores, their figures, and the shrinking of a failing one
``mutants``    the real code broken on purpose: the checker must see each
=============  ==================================================================================
"""
