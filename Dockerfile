# Three images: --target cpu (the default), cuda or tpu. docs/deploy.md says how they are built,
# pushed and run. Every package is the one that the tests ran with, by its SHA-256: `make lock`.
ARG PYTHON=python:3.11.14-slim-bookworm
# sha256:..., so that the base is that very one.
ARG DIGEST=

FROM ${PYTHON}${DIGEST:+@${DIGEST}} AS build
WORKDIR /source
COPY docker/requirements-build.txt docker/requirements-cpu.txt docker/requirements-cuda.txt \
     docker/requirements-tpu.txt pyproject.toml README.md LICENSE ./
COPY src src
RUN python -m venv /opt/build \
 && /opt/build/bin/pip install --no-cache-dir --require-hashes --requirement requirements-build.txt \
 && /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir wheel . \
 && python -m venv /opt/spile \
 && /opt/spile/bin/pip install --no-cache-dir --require-hashes --requirement requirements-cpu.txt \
 && /opt/spile/bin/pip install --no-cache-dir --no-deps --no-index wheel/*.whl

FROM build AS build-cuda
RUN /opt/spile/bin/pip install --no-cache-dir --require-hashes --requirement requirements-cuda.txt

FROM build AS build-tpu
RUN /opt/spile/bin/pip install --no-cache-dir --require-hashes --requirement requirements-tpu.txt

# `spile extract` reads COORDINATOR_ADDRESS, NUM_HOSTS, HOST_ID, MACHINE_ID and TOTAL_MACHINES itself.
FROM ${PYTHON}${DIGEST:+@${DIGEST}} AS base
ENV PATH=/opt/spile/bin:$PATH \
    PYTHONUNBUFFERED=1
RUN useradd --uid 1000 --create-home spile
WORKDIR /home/spile
HEALTHCHECK --interval=5m --timeout=30s --start-period=1m CMD ["spile", "--version"]
ENTRYPOINT ["spile"]
CMD ["--help"]

FROM base AS cuda
COPY --from=build-cuda /opt/spile /opt/spile
USER 1000

FROM base AS tpu
COPY --from=build-tpu /opt/spile /opt/spile
# The TPU's devices and libtpu's lock belong to root.
# hadolint ignore=DL3002
USER 0

FROM base AS cpu
COPY --from=build /opt/spile /opt/spile
USER 1000
