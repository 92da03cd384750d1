# The agent of one node. The driver's libraries and /dev/nvidia* are not in the image: the NVIDIA runtime class
# (or --gpus all) puts the host's there.
#   docker build -f deploy/docker/agent.Dockerfile -t coslice-agent:0.1.0 .
#
# What it needs, and why:
#   --pid=host           (hostPID)      it watches the ends of jobs' processes, measures and checkpoints them
#   --cap-add SYS_PTRACE                the CUDA driver reaches a process only for its user with this capability
#   --cap-add KILL                      on_stuck=kill ends processes of other users; leave it out with on_stuck=wait
#   -v /var/lib/coslice:/var/lib/coslice (hostPath) its state outlives it; jobs mount /var/lib/coslice/run, where
#                                       the socket is that tells it who asks
# Not: privileged, SYS_ADMIN, the host's network or ipc, a writable root file system.
FROM python:3.12-slim AS build
COPY . /src
RUN python -m venv /opt/coslice \
    && /opt/coslice/bin/pip install --no-cache-dir "/src[cuda,engines,ha,otel]" \
    # --device cuda asks torch for the size of the devices
    && /opt/coslice/bin/pip install --no-cache-dir "torch>=2.6"

FROM python:3.12-slim
COPY --from=build /opt/coslice /opt/coslice
ENV PATH=/opt/coslice/bin:$PATH \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Root, without root's capabilities: capabilities that are added reach root alone, and the folder is root's.
# hadolint ignore=DL3002
USER 0:0
EXPOSE 9001 9301
VOLUME /var/lib/coslice
ENTRYPOINT ["coslice"]
CMD ["agent", "--state", "/var/lib/coslice"]
