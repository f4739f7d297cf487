# The sidecar: `ds-ckpt agent`, and `ds-ckpt restore` as an init container.
#
# BASE is an argument so that a mirror or a digest can stand in its place:
#   --build-arg BASE=registry.example/python:3.13-slim-trixie@sha256:...
ARG BASE=docker.io/library/python:3.13-slim-trixie

FROM ${BASE} AS build
WORKDIR /build
# Exact versions with hashes, and wheels only: nothing is compiled, nothing else gets in.
COPY image/build.txt image/requirements.txt ./
RUN pip install --no-cache-dir --require-hashes --only-binary=:all: --requirement build.txt \
    && python -m venv --without-pip /opt/ds-ckpt \
    && pip --python /opt/ds-ckpt/bin/python install --no-cache-dir --no-compile \
        --require-hashes --only-binary=:all: --requirement requirements.txt
# Tests that packages bring along go, and of the 400 services that botocore describes all but S3 and
# those that credentials come from: roles, web identities and single sign-on.
RUN packages=$(echo /opt/ds-ckpt/lib/python3*/site-packages) \
    && find "$packages" '(' -name tests -o -name conftest.py -o -name 'test_*.py' ')' \
        -prune -exec rm -r '{}' + \
    && find "$packages/botocore/data" -mindepth 1 -maxdepth 1 -type d \
        ! -name s3 ! -name sts ! -name sso ! -name sso-oidc ! -name signin -exec rm -r '{}' +
# Bytecode, also of Python's own library, whose image has none: with a read-only root each start
# would compile it anew. In a tree apart, so that it is copied with the rest.
RUN export PYTHONPYCACHEPREFIX=/opt/ds-ckpt/bytecode \
    && compile="python -m compileall -q -j 0 --invalidation-mode unchecked-hash" \
    && $compile /opt/ds-ckpt/lib \
    && $compile -x '/(site-packages|dist-packages|test|idlelib|tkinter|turtledemo|ensurepip)/' \
        "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
COPY pyproject.toml README.md LICENSE ./
COPY trainer_hook trainer_hook
COPY sidecar sidecar
RUN pip wheel --no-cache-dir --no-index --no-deps --no-build-isolation --wheel-dir wheels . \
    && pip --python /opt/ds-ckpt/bin/python install --no-cache-dir --no-compile \
        --no-index --no-deps wheels/*.whl \
    && PYTHONPYCACHEPREFIX=/opt/ds-ckpt/bytecode python -m compileall -q \
        --invalidation-mode unchecked-hash /opt/ds-ckpt/lib/python3*/site-packages/ds_ckpt_*

FROM ${BASE}
ARG VERSION=0.1.0
ARG REVISION=""
LABEL org.opencontainers.image.title="ds-ckpt-sidecar" \
      org.opencontainers.image.description="DeepSpeed checkpoints that survive the pod" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /opt/ds-ckpt /opt/ds-ckpt
ENV PATH=/opt/ds-ckpt/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONPYCACHEPREFIX=/opt/ds-ckpt/bytecode
USER 65532:65532
ENTRYPOINT ["ds-ckpt"]
CMD ["agent"]
