"""Who may share a group, judged while jobs run: profiles as the lock sees them, drift, verdicts.

``watch`` hears a lock and makes a ``trail`` of cycles of each job, ``drift`` says when a job has changed,
``outlook`` plays jobs together (with the simulator, so with the lock's own core), ``arrange`` looks for the
least that has to change, ``warden`` decides when to ask and ``verdict`` what follows, ``books`` remember it,
over restarts too; one of each for each group. All of it is pure: the orchestrator and the simulator feed the
same warden and carry out what it says. Nothing here is part of the lock."""
