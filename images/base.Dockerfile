# Bases for machines without a registry, and for the CPU: Debian with Python, and the same with a CPU build of torch.
# With the secrets apt.list, apt.conf and ca.crt, packages come from the builder's own mirror.
ARG DEBIAN=debian:trixie-slim

FROM ${DEBIAN} AS python
RUN --mount=type=secret,id=apt.list,target=/etc/apt/sources.list.d/builder.list \
    --mount=type=secret,id=apt.conf,target=/etc/apt/apt.conf.d/90builder \
    --mount=type=secret,id=ca.crt,target=/run/secrets/ca.crt \
    apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/log/apt /var/log/dpkg.log

FROM python AS torch-cpu
RUN --mount=type=secret,id=apt.list,target=/etc/apt/sources.list.d/builder.list \
    --mount=type=secret,id=apt.conf,target=/etc/apt/apt.conf.d/90builder \
    --mount=type=secret,id=ca.crt,target=/run/secrets/ca.crt \
    apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends libopenblas0-openmp python3-numpy python3-torch \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/log/apt /var/log/dpkg.log
