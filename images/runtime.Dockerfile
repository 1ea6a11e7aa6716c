# The model server. BASE is an image with Python 3.11 or later as `python3` and torch, such as pytorch/pytorch for CUDA
# (torch 2.9 or later), or the torch-cpu stage of base.Dockerfile (2.6 or later).
# EXTRAS="runtime fast gpu" adds the CUDA attention kernels. PREBUILD names models (shape://qwen3-14b hf://org/name) whose GPU
# kernels are compiled into the image, for compute capability ARCH and each number of ranks in TP ("1 4"). This needs a C
# compiler and Python's headers, but no GPU; if there is nvcc, FlashInfer's kernels are included. COMPILER is an image with
# these and the same Python and torch, for a BASE without them: the resulting image then needs no compiler.
ARG BASE
ARG COMPILER=${BASE}

FROM ${BASE} AS build
RUN --mount=type=secret,id=pip.conf,target=/run/secrets/pip.conf \
    --mount=type=secret,id=ca.crt,target=/run/secrets/ca.crt \
    python3 -m venv --system-site-packages /opt/build \
    && PIP_CONFIG_FILE=/run/secrets/pip.conf /opt/build/bin/pip install --quiet --no-cache-dir hatchling packaging

# A stage of its own, so that an edit of pyproject.toml that changes no requirement does not reinstall everything.
FROM build AS requirements
ARG EXTRAS="runtime fast"
WORKDIR /source
COPY pyproject.toml constraints.txt images/requirements.py ./
RUN /opt/build/bin/python requirements.py /requirements ${EXTRAS}

# The environment contains no pip. Bytecode that is never checked against its sources makes the start faster.
FROM build AS dependencies
COPY --from=requirements /requirements /requirements
RUN --mount=type=secret,id=pip.conf,target=/run/secrets/pip.conf \
    --mount=type=secret,id=ca.crt,target=/run/secrets/ca.crt \
    python3 -m venv --system-site-packages --without-pip /opt/skiff \
    && PIP_CONFIG_FILE=/run/secrets/pip.conf /opt/build/bin/pip --python /opt/skiff/bin/python install \
        --quiet --no-cache-dir --no-compile -r /requirements/requirements.txt -c /requirements/constraints.txt \
    && PIP_CONFIG_FILE=/run/secrets/pip.conf /opt/build/bin/pip --python /opt/skiff/bin/python install \
        --quiet --no-cache-dir --no-compile --no-deps -r /requirements/alone.txt -c /requirements/constraints.txt \
    && /opt/skiff/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/skiff/lib

FROM dependencies AS application
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY runtime/skiff_router runtime/skiff_router
COPY runtime/skiff_runtime runtime/skiff_runtime
RUN /opt/build/bin/pip wheel --quiet --no-deps --no-build-isolation --no-index --wheel-dir /wheels . \
    && /opt/build/bin/pip --python /opt/skiff/bin/python install \
        --quiet --no-deps --no-index --no-compile --target /opt/app /wheels/*.whl \
    && /opt/skiff/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/app \
    && rm /opt/app/bin/skiff-operator \
    && PYTHONPATH=/opt/app /opt/app/bin/skiff --help > /dev/null

FROM ${COMPILER} AS kernels
COPY --from=dependencies /opt/skiff /opt/skiff
COPY --from=application /opt/app /opt/app
ARG PREBUILD=""
ARG ARCH=9.0a
ARG TP=1
ENV SKIFF_KERNEL_CACHE_DIR=/opt/skiff-kernels PYTHONPATH=/opt/app PATH=/opt/app/bin:/opt/skiff/bin:${PATH}
RUN mkdir -p /opt/skiff-kernels \
    && for model in ${PREBUILD}; do for tp in ${TP}; do \
        skiff prebuild --model-config "$model" --arch ${ARCH} --tp "$tp" || exit 1; done; done \
    && chmod -R a+rX /opt/skiff-kernels

FROM ${BASE}
RUN echo 'skiff:x:65532:65532::/tmp:/usr/sbin/nologin' >> /etc/passwd && echo 'skiff:x:65532:' >> /etc/group
ENV HOME=/tmp PATH=/opt/app/bin:/opt/skiff/bin:${PATH} PYTHONPATH=/opt/app PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    SKIFF_KERNEL_CACHE_DIR=/opt/skiff-kernels
WORKDIR /opt/app
USER 65532:65532
ENTRYPOINT ["skiff"]
COPY --from=dependencies /opt/skiff /opt/skiff
COPY --from=application /opt/app /opt/app
COPY --from=kernels /opt/skiff-kernels /opt/skiff-kernels
