# The orchestrator: no device, no rights, no shell needed.
#   docker build -f deploy/docker/orchestrator.Dockerfile -t coslice-orchestrator:0.1.0 .
FROM python:3.12-slim AS build
COPY . /src
RUN python -m venv /opt/coslice \
    && /opt/coslice/bin/pip install --no-cache-dir "/src[ha,otel]"

FROM python:3.12-slim
COPY --from=build /opt/coslice /opt/coslice
# Not root: the chart's runAsUser is the same. State, if any, is a volume at /var/lib/coslice.
RUN install -d -o 65532 -g 65532 -m 0700 /var/lib/coslice
USER 65532:65532
ENV PATH=/opt/coslice/bin:$PATH \
    HOME=/tmp \
    PYTHONUNBUFFERED=1
# Clients, agents, pages.
EXPOSE 50051 50052 9300
VOLUME /var/lib/coslice
ENTRYPOINT ["coslice"]
CMD ["orchestrator", "--state", "/var/lib/coslice"]
