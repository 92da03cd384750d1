"""A LoRA job for the agent's tests. Run it as a script with JSON: job, group, sizes in MiB, and the arguments
of ``register`` for the frozen base.

Words on stdin: ``digest``, ``step`` (changes the adapter), ``merge`` (changes one piece of the base),
``work`` (1 MiB of working memory, kept until ``rest``); each is answered by a line of JSON.
"""

import json
import sys

import torch
from agent.torch_workload import MIB, digest, say

from coslice.workload import register


def main() -> None:
    about = json.loads(sys.argv[1])
    torch.manual_seed(about.get("seed", 1))
    base = [torch.nn.Parameter(torch.randn(MIB // 4), requires_grad=False) for _ in range(about["base"])]
    torch.manual_seed(sum(about["job"].encode()))
    lora = [torch.nn.Parameter(torch.randn(MIB // 4)) for _ in range(about["adapter"])]
    lists = {"base": torch.nn.ParameterList(base), "lora_a": torch.nn.ParameterList(lora)}
    if about.get("save"):
        torch.save({str(i): tensor.detach() for i, tensor in enumerate(base)}, about["save"])
    model = torch.nn.ModuleDict(lists)
    need = about["need"] * MIB
    handle = register(model, job=about["job"], group=about["group"], need=need, **about["frozen"])
    say(event="registered", error=str(handle.error or ""))
    working: list[torch.Tensor] = []
    for line in sys.stdin:
        word = line.strip()
        with torch.no_grad():
            for tensor in {"step": lora, "merge": base[:1]}.get(word, []):
                tensor.add_(1.0)
        if word == "work":
            working.append(torch.ones(MIB // 4))
        elif word == "rest":
            working.clear()
        say(event="did", word=word, digest=digest([*base, *lora]) if word == "digest" else "")


if __name__ == "__main__":
    main()
