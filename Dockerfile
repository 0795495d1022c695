# Two images: `gateway`, without MLX, and `worker`, with it (on the CPU: a container sees no Metal).
# What they hold comes from the locks, by hash; what builds it stays behind in the first stages.

FROM python:3.13.16-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PATH=/opt/paceline/bin:$PATH
# A new volume takes over the owner of the folder that it is put on.
RUN groupadd --system --gid 10001 paceline \
    && useradd --system --uid 10001 --gid paceline --no-create-home --home-dir /tmp paceline \
    && install --directory --owner=paceline --group=paceline --mode=0700 /state
WORKDIR /tmp

# The uv of the lock installs the others. It lies beside /opt/paceline, so no image gets it.
FROM base AS installer
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
    UV_NO_CACHE=1 UV_COMPILE_BYTECODE=1 VIRTUAL_ENV=/opt/paceline
COPY locks/setup.txt /src/locks/
RUN pip install --require-hashes --requirement /src/locks/setup.txt --no-deps \
    && python -m venv --without-pip /opt/paceline

FROM installer AS built-gateway
COPY locks/gateway.txt /src/locks/
RUN uv pip install --require-hashes --requirement /src/locks/gateway.txt --no-deps
COPY pyproject.toml hatch_build.py README.md LICENSE /src/
COPY mkdocs.yml /src/
COPY docs /src/docs
COPY gateway /src/gateway
COPY paceline /src/paceline
COPY policies /src/policies
COPY workers /src/workers
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheel /src \
    && uv pip install --no-deps /wheel/*.whl

FROM installer AS built-worker
# For linux/arm64, which is what Docker runs on a Mac, miniaudio has no wheel: it is compiled.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
COPY locks/worker.txt /src/locks/
RUN uv pip install --require-hashes --requirement /src/locks/worker.txt --no-deps
COPY --from=built-gateway /wheel /wheel
RUN uv pip install --no-deps /wheel/*.whl

FROM base AS worker
# MLX compiles its CPU kernels with the one, and multiplies many times faster with the other.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libopenblas0-pthread \
    && rm -rf /var/lib/apt/lists/*
COPY --from=built-worker /opt/paceline /opt/paceline
USER paceline
EXPOSE 9200
HEALTHCHECK --interval=10s --timeout=5s --start-period=180s --retries=3 \
    CMD ["python", "-c", "import urllib.request as ask; ask.urlopen('http://127.0.0.1:9200/livez', timeout=4)"]
# Every start is in exec form: signals reach Paceline, and SIGTERM lets running answers finish.
CMD ["paceline", "worker", "--host", "0.0.0.0", "--port", "9200"]

# The last stage is what `docker build .` makes.
FROM base AS gateway
COPY --from=built-gateway /opt/paceline /opt/paceline
USER paceline
EXPOSE 8000
VOLUME /state
ENV PACELINE_STATE_DIR=/state
HEALTHCHECK --interval=5s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import urllib.request as ask; ask.urlopen('http://127.0.0.1:8000/livez', timeout=4)"]
CMD ["paceline", "gateway", "--host", "0.0.0.0", "--port", "8000"]
