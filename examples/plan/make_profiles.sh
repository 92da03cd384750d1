#!/bin/sh
# Five jobs as profiles, without anybody having measured them. Of jobs that run, take their logs instead:
#   coslice profile train.log --out profiles/
set -eu
out=${1:-profiles}
mkdir -p "$out"
given() { coslice profile --name "$1" --busy "$2" --period "$3" --staleness "$4" --accelerators "$5" \
    --state "$6" --out "$out/$1.json" >/dev/null; }
#     name    busy  period  staleness  GPUs  state on each
given math    198   430     8          1     50GB
given code    281   619     8          1     60GB
given search  30    240     0          1     20GB
given chat    45    100     0          4     70GB
given tools   40    105     1          4     70GB
