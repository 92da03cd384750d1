"""Live progress of the demo on a terminal; plain lines where the output is not one."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from coslice.demo.blocks import JobPlan, Listener, StepRecord

REFRESH_PER_SECOND = 4
_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float]) -> str:
    """Values in [0, 1] as bars."""
    return "".join(_BARS[min(7, max(0, int(value * 8)))] for value in values)


@dataclass
class _Row:
    plan: JobPlan
    where: str = "starting"
    rewards: list[float] = field(default_factory=list)


class View(Listener):
    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, emoji=False)
        self._begun = time.monotonic()
        self._title = ""
        self._shared = False
        self._rows: dict[str, _Row] = {}
        self._live = Live(
            console=self.console,
            refresh_per_second=REFRESH_PER_SECOND,
            get_renderable=self._draw,
            transient=True,
        )

    def __enter__(self) -> Self:
        self._begun = time.monotonic()
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def stage(self, title: str) -> None:
        self._title, self._rows, self._shared = title, {}, False
        self._print(title)

    def block(self, title: str, plans: Sequence[JobPlan], *, shared: bool) -> None:
        self._title, self._shared = title, shared
        self._rows = {plan.name: _Row(plan) for plan in plans}
        self._print(f"{title} …")

    def section(self, job: str) -> None:
        self._rows[job].where = "on the accelerator"

    def off(self, job: str) -> None:
        self._rows[job].where = "verifier scores its answers"

    def step(self, job: str, record: StepRecord) -> None:
        row = self._rows[job]
        row.rewards.append(record.reward)
        if len(row.rewards) == row.plan.steps:
            row.where = "done"
        else:
            row.where = "wants the accelerator" if self._shared else "between steps"

    def ended(self, job: str) -> None:
        row = self._rows[job]
        row.where = "done"
        if row.rewards:
            self._print(
                f"  {job}: {len(row.rewards)} steps, reward {row.rewards[0]:.2f} → {row.rewards[-1]:.2f}"
            )

    def _print(self, text: str) -> None:
        self.console.print(f"[dim]{time.monotonic() - self._begun:5.0f} s[/]  {text}")

    def _draw(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for name, row in self._rows.items():
            on = row.where == "on the accelerator"
            reward = f"{row.rewards[-1]:.2f}" if row.rewards else "    "
            table.add_row(
                Text(name, style="bold"),
                f"step {len(row.rewards)}/{row.plan.steps}",
                f"reward {reward} {sparkline(row.rewards)}",
                Text(("● " if on else "○ ") + row.where, style="green" if on else "dim"),
            )
        elapsed = Text(f"{time.monotonic() - self._begun:5.0f} s  {self._title}", style="cyan")
        return Group(elapsed, table) if self._rows else elapsed
