# The operator and the router (command skiff-router): no torch. BASE is any image with Python 3.11 or later as `python3`, with venv.
ARG BASE=python:3.13-slim

FROM ${BASE} AS build
RUN --mount=type=secret,id=pip.conf,target=/run/secrets/pip.conf \
    --mount=type=secret,id=ca.crt,target=/run/secrets/ca.crt \
    python3 -m venv --system-site-packages /opt/build \
    && PIP_CONFIG_FILE=/run/secrets/pip.conf /opt/build/bin/pip install --quiet --no-cache-dir hatchling packaging

# A stage of its own, so that an edit of pyproject.toml that changes no requirement does not reinstall everything.
FROM build AS requirements
WORKDIR /source
COPY pyproject.toml constraints.txt images/requirements.py ./
RUN /opt/build/bin/python requirements.py /requirements operator router

# The environment contains no pip. Bytecode that is never checked against its sources makes the start faster.
FROM build AS dependencies
COPY --from=requirements /requirements /requirements
RUN --mount=type=secret,id=pip.conf,target=/run/secrets/pip.conf \
    --mount=type=secret,id=ca.crt,target=/run/secrets/ca.crt \
    python3 -m venv --system-site-packages --without-pip /opt/skiff \
    && PIP_CONFIG_FILE=/run/secrets/pip.conf /opt/build/bin/pip --python /opt/skiff/bin/python install \
        --quiet --no-cache-dir --no-compile -r /requirements/requirements.txt -c /requirements/constraints.txt \
    && /opt/skiff/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/skiff/lib

# The operator needs only the contract of the runtime; the router also needs the HTTP path of its API.
FROM dependencies AS application
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY operator/skiff_operator operator/skiff_operator
COPY runtime/skiff_router runtime/skiff_router
COPY runtime/skiff_runtime/__init__.py runtime/skiff_runtime/contract.py runtime/skiff_runtime/version.py runtime/skiff_runtime/
COPY runtime/skiff_runtime/batch_writer.py runtime/skiff_runtime/errors.py runtime/skiff_runtime/internals.py runtime/skiff_runtime/log.py runtime/skiff_runtime/prompt_blocks.py runtime/skiff_runtime/sse.py runtime/skiff_runtime/state_events.py runtime/skiff_runtime/
COPY runtime/skiff_runtime/config/__init__.py runtime/skiff_runtime/config/adapters.py runtime/skiff_runtime/config/api_keys.py runtime/skiff_runtime/config/config.py runtime/skiff_runtime/config/kv_events.py runtime/skiff_runtime/config/
COPY runtime/skiff_runtime/api/__init__.py runtime/skiff_runtime/api/
COPY runtime/skiff_runtime/api/http runtime/skiff_runtime/api/http
RUN /opt/build/bin/pip wheel --quiet --no-deps --no-build-isolation --no-index --wheel-dir /wheels . \
    && /opt/build/bin/pip --python /opt/skiff/bin/python install \
        --quiet --no-deps --no-index --no-compile --target /opt/app /wheels/*.whl \
    && /opt/skiff/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/app \
    && rm /opt/app/bin/skiff \
    && PYTHONPATH=/opt/app /opt/app/bin/skiff-operator --help > /dev/null \
    && PYTHONPATH=/opt/app /opt/app/bin/skiff-router --help > /dev/null

FROM ${BASE}
RUN echo 'skiff:x:65532:65532::/tmp:/usr/sbin/nologin' >> /etc/passwd && echo 'skiff:x:65532:' >> /etc/group
ENV HOME=/tmp PATH=/opt/app/bin:/opt/skiff/bin:${PATH} PYTHONPATH=/opt/app PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
WORKDIR /opt/app
USER 65532:65532
ENTRYPOINT ["skiff-operator"]
COPY --from=dependencies /opt/skiff /opt/skiff
COPY --from=application /opt/app /opt/app
