# A user's pod: curl and the official openai client. BASE is any Debian with Python as `python3`, with venv.
ARG BASE
FROM ${BASE}
RUN --mount=type=secret,id=apt.list,target=/etc/apt/sources.list.d/builder.list \
    --mount=type=secret,id=apt.conf,target=/etc/apt/apt.conf.d/90builder \
    --mount=type=secret,id=ca.crt,target=/run/secrets/ca.crt \
    apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends curl \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/log/apt /var/log/dpkg.log
RUN --mount=type=secret,id=pip.conf,target=/run/secrets/pip.conf \
    --mount=type=secret,id=ca.crt,target=/run/secrets/ca.crt \
    python3 -m venv /opt/client \
    && PIP_CONFIG_FILE=/run/secrets/pip.conf /opt/client/bin/pip install --quiet --no-cache-dir openai
ENV PATH=/opt/client/bin:${PATH} PYTHONUNBUFFERED=1
USER 65532:65532
