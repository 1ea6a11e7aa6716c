"""``skiff tune``: measures the candidates for tuned numbers on a GPU and prints a table of ``kernels.tuning`` for it.

``tunables`` lists the numbers, their candidates and the workloads that judge them; ``measure`` times these and
chooses; ``report`` prints what was measured and the table.
"""
