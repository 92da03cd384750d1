"""What would happen: jobs, groups and swap costs on a virtual clock, decided by the real cores.

``engine`` drives ``core.group.step`` for every lock and ``core.context.step`` for every node; nothing here
decides who goes next or what has to leave. ``coslice simulate``, the planner and admission call ``simulate``.
"""
