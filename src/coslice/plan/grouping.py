"""Which sets of units are best. Few of them exactly, many by search; what must be alone stays alone."""

from collections import Counter
from collections.abc import Sequence

from coslice.plan import rules
from coslice.plan.batch import Table
from coslice.plan.cluster import Cluster
from coslice.plan.exact import allowed_sets, best_partition, promising
from coslice.plan.search import search
from coslice.plan.settle import Members
from coslice.plan.units import Unit

TOLD = 64
"""Up to so many units, the reason of every pair that cannot share is told."""
_MOST_TOLD = 1000


def _budget(units: int) -> float:
    """Seconds, by default: what people wait for without wondering; a thousand jobs within one."""
    return 2.0 if units <= 300 else 0.45 if units <= 1200 else units / 1000


class Grouping:
    """Groups, and why other pairs are none."""

    def __init__(
        self,
        table: Table,
        cluster: Cluster,
        max_jobs: int,
        share: set[str],
        seed: int,
        began: float,
        budget: float | None,
    ) -> None:
        self.table, self.units, self.cluster, self.max_jobs = table, table.units, cluster, max_jobs
        self.share, self.seed, self.began = share, seed, began
        self.budget = budget if budget is not None else _budget(len(self.units))
        names = {name: number for number, name in enumerate(dict.fromkeys(unit.job for unit in self.units))}
        self.jobs = [names[unit.job] for unit in self.units]
        self.pools = Counter(unit.job for unit in self.units)
        self.failed: dict[Members, tuple[float, ...]] = {}
        self.notes: list[str] = []
        self.alone: list[Members] = []
        """Units that share with nobody, whatever the others do."""

    def run(self) -> tuple[list[list[Members]], str]:
        """The best plans that were found, and how."""
        fit = []
        for number, unit in enumerate(self.units):
            if why := rules.unfit(unit, self.cluster):
                self.notes.append(f"{unit.label} {why}")
                self.alone.append((number,))
            elif not self._shares(unit):
                self.alone.append((number,))
            else:
                fit.append(number)
        price = self._price([(unit,) for unit in fit], {})
        asked = promising(self.table, fit, may=self._may, max_jobs=self.max_jobs)
        if asked is not None:
            plans, method = [self._exactly(fit, asked, price)], "exact"
        else:
            found = search(
                self.table,
                fit,
                may=self._may_quickly,
                max_jobs=self.max_jobs,
                price=price,
                deadline=self.began + self.budget,
                seed=self.seed,
                beside=(sum(map(self._alone, self.alone)), sum(map(self._weight, self.alone))),
            )
            plans = list(found.plans)
            self.failed.update(found.refused)
            method = f"searched: {found.edges} mergers predicted, {found.moves} moves improved it"
        return [sorted(groups + self.alone) for groups in plans], method

    def _shares(self, unit: Unit) -> bool:
        return not self.share or unit.pool in self.share or unit.role in self.share

    def _may(self, members: Sequence[int]) -> bool:
        units = [self.units[number] for number in members]
        if not rules.fits_host(units, self.cluster):
            return False
        return not any(
            rules.never(one, other, self.cluster) for k, one in enumerate(units) for other in units[k + 1 :]
        )

    def _may_quickly(self, members: Members) -> bool:
        """The same as ``_may``, for very many."""
        if len({self.jobs[number] for number in members}) < len(members):
            return False
        return not self.cluster.host_memory or rules.fits_host([self.units[n] for n in members], self.cluster)

    def _exactly(self, units: Sequence[int], asked: Sequence[Members], price: float) -> list[Members]:
        sets, failed = allowed_sets(self.table, units, asked)
        self.failed.update({pair: tuple(values) for pair, values in failed.items() if len(pair) == 2})
        groups: list[Members] = []
        for _ in range(8):  # the price settles in two or three
            worth = {group: held - price * self._weight(group) for group, held in sets.items()}
            groups = best_partition(worth, units)
            before, price = price, self._price(groups, sets)
            if price <= before + 1e-9:
                break
        return groups

    def _weight(self, group: Members) -> float:
        return max(float(self.table.weight[unit]) for unit in group)

    def _alone(self, group: Members) -> float:
        return sum(float(self.table.weight[unit] * self.table.duty[unit]) for unit in group)

    def _price(self, groups: Sequence[Members], held: dict[Members, float]) -> float:
        """What an accelerator computes on average, now."""
        everybody = [*groups, *self.alone]
        total = sum(map(self._weight, everybody))
        done = sum(held[group] if group in held else self._alone(group) for group in everybody)
        return done / total if total else 0.0

    def refused(self) -> dict[str, str]:
        """Why pairs cannot share, in words."""
        told: dict[str, str] = {}
        if len(self.units) <= TOLD:
            pairs = [(a, b) for b in range(len(self.units)) for a in range(b)]
        else:
            pairs = [(group[0], group[1]) for group in self.failed if len(group) == 2]
            if len(pairs) > _MOST_TOLD:
                self.notes.append(
                    f"{len(pairs)} pairs were predicted and refused; {_MOST_TOLD} of them are told"
                )
                pairs = pairs[:_MOST_TOLD]
        for a, b in pairs:
            one, other = self.units[a], self.units[b]
            if not (self._shares(one) and self._shares(other)):
                continue
            unfit = [(unit, why) for unit in (one, other) if (why := rules.unfit(unit, self.cluster))]
            why = "; ".join(f"{self._name(unit)} {why}" for unit, why in unfit)
            why = why or rules.never(one, other, self.cluster) or rules.too_much(one, other)
            if not why and (slow := self.failed.get((a, b))) is not None:
                why = rules.too_slow(one, other, slow)
            if why:
                told[f"{self._name(one)} + {self._name(other)}"] = why
        return told

    def _name(self, unit: Unit) -> str:
        """The job's name, with its pool where it has several."""
        return unit.label if self.pools[unit.job] > 1 else unit.job
