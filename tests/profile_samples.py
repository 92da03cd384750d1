"""Small files in the shapes that trainers and tools write, with figures of our own."""

import json
from datetime import datetime, timedelta


def verl_async_log(steps: int = 4) -> str:
    """A fully-async run: rollouter lines, parameter-sync lines and trainer lines, coloured as ray does."""
    prefix = "\x1b[36m(FullyAsyncTrainer pid=77)\x1b[0m "
    lines = [
        f"{prefix}[FullyAsyncTrainer] _fit_update_weights, timing_s/param_sync: 2.5 seconds "
        "self.current_param_version: 0",
        f"{prefix}step:0 - fully_async/rollouter/active_time:40.0 - fully_async/rollouter/version_time:40.0 "
        "- fully_async/rollouter/idle_ratio:0",
        "some other line of the log",
    ]
    for step in range(1, steps + 1):
        gen, update, sync, extra = 30.0 + step, 50.0 + 2 * step, 2.0, 3.0
        total = gen + update + sync + extra
        lines.append(
            f"{prefix}[FullyAsyncTrainer] _fit_update_weights, timing_s/param_sync: {sync} seconds "
            f"self.current_param_version: {step}"
        )
        lines.append(
            f"{prefix}step:{step} - fully_async/rollouter/active_time:{60.0 + step} - "
            f"fully_async/rollouter/version_time:{80.0 + step} - fully_async/rollouter/idle_ratio:0.25"
        )
        lines.append(
            f"{prefix}step:{step} - training/global_step:{step}.0 - "
            "fully_async/static/staleness_threshold:2.0 - "
            f"timing_s/agent_loop/tool_calls/max:9.0 - actor/perf/max_memory_allocated_gb:{20 + step}.5 - "
            f"actor/perf/max_memory_reserved_gb:60.25 - timing_s/gen:{gen} - timing_s/reward:3.1e-05 - "
            f"timing_s/adv:0.01 - timing_s/update_actor:{update} - timing_s/timing_s/param_sync:{sync} - "
            f"timing_s/step:{total} - perf/throughput:nan"
        )
    return "\n".join(lines) + "\n"


def verl_colocated_log(steps: int = 5) -> str:
    lines = []
    for step in range(1, steps + 1):
        lines.append(
            f"(TaskRunner pid=9) step:{step} - actor/pg_loss:np.float64(-0.01) - "
            f"timing_s/gen:np.float64({100.0 + step}) - "
            f"timing_s/reward:{20.0} - timing_s/old_log_prob:5.0 - timing_s/generate_sequences:99.0 - "
            f"timing_s/adv:0.1 - timing_s/update_actor:18.0 - timing_s/update_weights:2.0 - "
            f"timing_s/step:{146.1 + step} - perf/max_memory_allocated_gb:33.0"
        )
    return "\n".join(lines) + "\n"


def verl_json_log() -> str:
    """Its file logger."""
    return "".join(
        json.dumps(
            {
                "step": step,
                "data": {"timing_s/gen": 10.0, "timing_s/update_actor": 5.0, "timing_s/step": 15.5},
            }
        )
        + "\n"
        for step in range(1, 4)
    )


def step_file(*, asynchronous: bool = True) -> str:
    rows = []
    for step in range(1, 6):
        row = {"step": step, "gen_s": 40.0 + step, "update_actor_s": 60.0, "step_s": 102.0 + step}
        if asynchronous:
            row |= {"param_sync_s": 2.0, "trainer_idle_ratio": 0.4, "actor_max_memory_allocated_gb": 50.0}
        rows.append(json.dumps(row))
    return "\n".join(rows) + "\n"


def trainer_state(*, profiled: bool = True) -> str:
    history: list[dict[str, float]] = []
    for step in range(1, 5):
        entry = {"step": step, "loss": 0.1, "reward": 0.5, "step_time": 30.0 + step}
        if profiled:
            entry |= {
                "profiling/Time taken: GRPOTrainer.vLLM.generate": 12.0,
                "profiling/Time taken: GRPOTrainer._calculate_rewards": 6.0,
                "profiling/Time taken: GRPOTrainer._prepare_inputs": 19.0,
            }
        history.append(entry)
    history.append({"step": 4, "eval_loss": 0.2, "eval_runtime": 3.0})
    history.append({"step": 4, "train_runtime": 140.0, "train_loss": 0.1})
    return json.dumps({"global_step": 4, "log_history": history})


def utilization_csv(*, interval: float = 0.5, cycles: int = 12) -> str:
    """GPU 0: 20 s busy of every 50, with a gap of 2 s in each block; GPU 1: 30 s busy, the rest idle."""
    lines = ["timestamp, index, utilization.gpu [%], memory.used [MiB]"]
    count = int(50 * cycles / interval)
    for number in range(count):
        at = number * interval
        phase = at % 50
        trains = phase >= 30 and not 38 <= phase < 40
        minutes, seconds = divmod(at, 60)
        stamp = f"2026/01/02 03:{int(minutes):02d}:{seconds:06.3f}"
        lines.append(f"{stamp}, 0, {90 if trains else 0} %, 40000 MiB")
        lines.append(f"{stamp}, 1, {70 if phase < 30 else 1} %, 30000 MiB")
    return "\n".join(lines) + "\n"


def dcgm_table(cycles: int = 10) -> str:
    lines = ["#Entity   SMACT", "ID"]
    for number in range(40 * cycles):
        lines.append(f"GPU 0     {0.8 if number % 40 >= 25 else 0.0}")
    return "\n".join(lines) + "\n"


def dmon_table(cycles: int = 8) -> str:
    """``nvidia-smi dmon -s u -o DT``, over midnight, its heading comes again. GPU 0: 20 s of every 50."""
    heading = ["#Date       Time        gpu    sm   mem", "#YYYYMMDD   HH:MM:SS    Idx     %     %"]
    lines, begin = [*heading], datetime(2026, 1, 2, 23, 58, 0)
    for number in range(50 * cycles):
        at = f"{begin + timedelta(seconds=number):%Y%m%d   %H:%M:%S}"
        trains = number % 50 >= 30
        lines += [
            f" {at}      0    {90 if trains else 0}     3",
            f" {at}      1    {0 if trains else 70}     3",
        ]
        if number % 20 == 19:
            lines += heading
    return "\n".join(lines) + "\n"


def exporter_csv(cycles: int = 8) -> str:
    """What Prometheus kept of a DCGM exporter, every 5 s."""
    lines = ["Time,gpu,UUID,DCGM_FI_DEV_GPU_UTIL,DCGM_FI_DEV_FB_USED"]
    for number in range(0, 50 * cycles, 5):
        at = f"2026-01-02T03:{number // 60:02d}:{number % 60:02d}Z"
        lines.append(f"{at},0,GPU-1,{90 if number % 50 >= 30 else 0},40000")
    return "\n".join(lines) + "\n"
