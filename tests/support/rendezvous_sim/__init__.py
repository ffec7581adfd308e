"""The rendezvous in simulated time: seeded schedules of faults against the real core, with named checkers.

::

    batch, __main__                          many schedules, or one with a trace
      simulation                             plays one schedule; what must hold after the last fault
        schedule                             a job and its faults, as data
          random_schedules, targeted_faults  draw one from a seed
        simulated_node, network              agents on their own clocks, disks, links
        invariants                           the checkers
    scenario                                 plays the commands of `tests/scenarios`
    mutations                                take a clause out of the core
"""
