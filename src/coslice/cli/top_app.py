"""The screen of ``coslice top``: groups above; the chosen one's jobs and a job's story below. Only looks."""

import time
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import DataTable, Footer, Input, Static

from coslice.cli.top import Wire, cells
from coslice.cli.top_track import Track
from coslice.errors import CosliceError
from coslice.observe.rows import GroupRow, JobRow, leadership, row
from coslice.sizes import format_size
from coslice.wire.v1 import coslice_pb2 as pb

SPAN_S, CELLS = 60.0, 40
REDRAW_S = 0.25
AGAIN_S = 1.0
COLUMNS = ("group", "lock", "job", "queue", "waits", "held", "last minute")
JOB_COLUMNS = ("job", "lock", "waits", "state is", "size", "why")
COLOURS = ("dodger_blue1", "dark_orange3", "green3", "orchid", "gold3", "cyan3", "wheat4", "medium_purple")
ORDERS = ("name", "trouble", "queue")


class TopApp(App[None]):
    TITLE = "coslice top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: auto; max-height: 2; padding: 0 1; background: $panel; }
    #filter { height: 3; display: none; }
    #groups { height: 3fr; }
    #about { height: auto; max-height: 7; padding: 0 1; background: $panel; }
    #below { height: 2fr; }
    #jobs { width: 3fr; }
    #story { width: 2fr; padding: 0 1; border-left: solid $panel; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("j", "down", "down", show=False),
        Binding("k", "up", "up", show=False),
        Binding("tab", "focus_next", "jobs"),
        Binding("slash", "filter", "filter"),
        Binding("s", "sort", "sort"),
        Binding("space", "pause", "pause"),
        Binding("escape", "unfilter", "no filter", show=False),
    ]

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self._wire = wire
        self.rows: dict[str, GroupRow] = {}
        self._tracks: dict[str, Track] = {}
        self._colours: dict[str, str] = {}
        self._newest: pb.GetStatusResponse | None = None
        """What was told and not drawn yet."""
        self._told = self._at = 0.0
        self._link, self._order, self._wanted = "connecting", "name", ""
        self._paused = False
        self._shown: list[str] = []
        self._jobs_shown: list[str] = []
        self.chosen, self.job = "", ""

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield Input(placeholder="filter groups, jobs, nodes, or drained", id="filter")
        yield DataTable[Text](id="groups", cursor_type="row", zebra_stripes=True)
        yield Static(id="about")
        with Horizontal(id="below"):
            yield DataTable[Text](id="jobs", cursor_type="row")
            with VerticalScroll(id="story"):
                yield Static(id="lines")
        yield Footer()

    def on_mount(self) -> None:
        self._groups.add_columns(*((name, name) for name in COLUMNS))
        self._jobs.add_columns(*((name, name) for name in JOB_COLUMNS))
        self._groups.focus()
        self.set_interval(REDRAW_S, self.redraw)
        self.set_interval(2.0, self._tell)
        self._follow()

    def on_unmount(self) -> None:
        self._wire.close()

    @property
    def _groups(self) -> "DataTable[Text]":
        return self.query_one("#groups", DataTable)

    @property
    def _jobs(self) -> "DataTable[Text]":
        return self.query_one("#jobs", DataTable)

    # ── what is told ───────────────────────────────────────────────────────

    @work(thread=True)
    def _follow(self) -> None:
        while not self._wire.closed.is_set():
            try:
                for state in self._wire.watch():
                    self.call_from_thread(self.take, state)
                said = "the stream ended"
            except CosliceError as error:
                said = str(error)
            if self._wire.closed.wait(AGAIN_S):  # a server that is back tells nobody
                return
            self.call_from_thread(self._lost, said)

    def _lost(self, said: str) -> None:
        self._link = said

    def take(self, state: pb.GetStatusResponse) -> None:
        """The newest status."""
        self._link = f"orchestrator {leadership(state.orchestrators, times=False) or state.orchestrator}"
        self._told, self._at = state.now, time.monotonic()
        for group in state.groups:
            self._tracks.setdefault(group.group, Track()).add(group, state.now)
        for name in self._tracks.keys() - {group.group for group in state.groups}:
            del self._tracks[name]
        self._newest = state

    def redraw(self) -> None:
        if self._paused or not self.query("#head"):  # gone already when the screen closes
            return
        if (newest := self._newest) is not None:
            self.rows, self._newest = {group.group: row(group) for group in newest.groups}, None
        rows = self.rows
        trouble = sum(bool(one.trouble) for one in rows.values())
        held = sum(one.state == "held" for one in rows.values())
        waiting = sum(len(one.waiting) for one in rows.values())
        head = Text(f"coslice top   {self._link}   {len(rows)} groups, {held} held, {waiting} jobs wait   ")
        head.append(f"{trouble} in trouble   " if trouble else "", "bold red")
        out = {node.node for one in rows.values() for node in one.nodes if node.out}
        head.append(f"{len(out)} node{'s' * (len(out) > 1)} drained   " if out else "", "yellow")
        head.append(f"by {self._order}", "dim")
        self.query_one("#head", Static).update(head)
        self._draw_groups()
        self._draw_chosen()

    def _draw_groups(self) -> None:
        names = [name for name, one in self.rows.items() if self._matches(one)]
        match self._order:
            case "trouble":
                names.sort(key=lambda name: (-len(self.rows[name].trouble), name))
            case "queue":
                names.sort(key=lambda name: (-len(self.rows[name].waiting), name))
            case _:
                names.sort()
        table = self._groups
        if names != self._shown:
            self._shown = names
            table.clear()
            for name in names:
                table.add_row(*self._group_cells(name), key=name)
            if self.chosen in names:
                table.move_cursor(row=names.index(self.chosen))
            return
        top = round(table.scroll_offset.y)
        for name in names[max(0, top - 1) : top + table.size.height]:  # what can be seen
            for column, cell in zip(COLUMNS, self._group_cells(name), strict=True):
                if table.get_cell(name, column) != cell:
                    table.update_cell(name, column, cell)

    def _matches(self, one: GroupRow) -> bool:
        return not self._wanted or any(
            self._wanted in name
            for name in (
                one.group,
                *(job.job for job in one.jobs),
                *(word for node in one.nodes for word in (node.node, node.out)),
            )
        )

    def _group_cells(self, name: str) -> list[Text]:
        one, track = self.rows[name], self._tracks[name]
        later = max(0.0, time.monotonic() - self._at)
        now = self._told + later
        lock, job, queue, waits = cells(one, self._told, later)
        strip = Text()
        for character, of in track.strip(now, SPAN_S, CELLS):
            strip.append(character, self._colour(of) if of else "dim")
        label = Text(name, "bold")
        if one.trouble:
            label.append(" ●", "bold red")
        label.append(" ⊘" if any(node.out for node in one.nodes) else "", "yellow")
        duty = Text(f"{100 * track.duty(now, SPAN_S):.0f} %", justify="right")
        return [
            label,
            Text(lock, "green" if lock == "held" else ""),
            Text(job),
            Text(queue),
            Text(waits),
            duty,
            strip,
        ]

    def _colour(self, job: str) -> str:
        return self._colours.setdefault(job, COLOURS[len(self._colours) % len(COLOURS)])

    def _draw_chosen(self) -> None:
        one, table = self.rows.get(self.chosen), self._jobs
        if one is None:
            self.query_one("#about", Static).update("")
            table.clear()
            self._jobs_shown = []
            return
        facts = f"{one.group}: epoch {one.epoch}, policy {one.policy}, {one.swaps} swaps, "
        facts += f"{format_size(one.moved)} moved"
        out = [f"node {node.node}: {node.drained}" for node in one.nodes if node.out]
        lines = [
            *(Text(line, "yellow") for line in out[:2]),
            *(Text(line, "red") for line in one.trouble[:4]),
        ]
        said = Text("\n").join([Text(facts, "bold"), *lines])
        self.query_one("#about", Static).update(said)
        jobs = [job.job for job in one.jobs]
        if jobs != self._jobs_shown:
            self._jobs_shown = jobs
            table.clear()
            for job in one.jobs:
                table.add_row(*self._job_cells(job), key=job.job)
            if self.job in jobs:
                table.move_cursor(row=jobs.index(self.job))
            return
        for job in one.jobs:
            for column, cell in zip(JOB_COLUMNS, self._job_cells(job), strict=True):
                if table.get_cell(job.job, column) != cell:
                    table.update_cell(job.job, column, cell)

    def _job_cells(self, job: JobRow) -> list[Text]:
        lost = "" if job.lost_left_s is None else f"connection lost, {job.lost_left_s:.0f} s left"
        lock = Text("; ".join(said for said in (job.lock, lost, job.door) if said))
        if lost or job.door or job.lock.startswith("frozen"):
            lock.stylize("yellow")
        waits = f"{job.place}. {job.waited_s:.1f} s" if job.place else ""
        where = Text("faulted", "bold red") if job.fault else Text(job.where or "nowhere")
        moved = format_size(job.bytes) if job.bytes else ""
        name = Text(job.job, self._colour(job.job))
        return [name, lock, Text(waits), where, Text(moved), Text(job.fault or job.reason or job.door_reason)]

    # ── keys ───────────────────────────────────────────────────────────────

    def on_data_table_row_highlighted(self, event: "DataTable.RowHighlighted") -> None:
        name = str(event.row_key.value or "")
        if event.data_table.id == "groups":
            if name != self.chosen:
                self.chosen, self.job = name, ""
                self.query_one("#lines", Static).update("")
                self._draw_chosen()
        elif name in self._jobs_shown:  # not of the group before
            self.job = name
            self._tell()

    def _tell(self) -> None:
        if self.chosen and self.job and not self._paused:
            self._fetch(self.chosen, self.job)

    @work(thread=True, exclusive=True, group="story")
    def _fetch(self, group: str, job: str) -> None:
        lines = self._wire.explain(group, job)
        if not self._wire.closed.is_set():
            self.call_from_thread(self._story, group, job, lines)

    def _story(self, group: str, job: str, lines: list[str]) -> None:
        if (group, job) == (self.chosen, self.job) and self.query("#lines"):
            self.query_one("#lines", Static).update(Text(f"the story of {job}\n\n" + "\n".join(lines)))

    def on_input_changed(self, event: Input.Changed) -> None:
        self._wanted = event.value.strip()
        self.redraw()

    def on_input_submitted(self, _: Input.Submitted) -> None:
        self._groups.focus()

    def action_down(self) -> None:
        self._table().action_cursor_down()

    def action_up(self) -> None:
        self._table().action_cursor_up()

    def _table(self) -> "DataTable[Text]":
        return self._jobs if self._jobs.has_focus else self._groups

    def action_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.display = True
        field.focus()

    def action_sort(self) -> None:
        self._order = ORDERS[(ORDERS.index(self._order) + 1) % len(ORDERS)]
        self.redraw()

    def action_pause(self) -> None:
        self._paused = not self._paused
        self.query_one("#head", Static).update(Text("it stands still; space: go on", "reverse"))
        self.redraw()

    def action_unfilter(self) -> None:
        field = self.query_one("#filter", Input)
        field.value, field.display = "", False
        self._groups.focus()
