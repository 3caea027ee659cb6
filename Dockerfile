# A DSec node or any of its actors: `docker build -t dsec .`, then docker-compose.yml. The client alone needs no image: `pip install .`
FROM debian:13-slim

RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv crun erofs-utils mmdebstrap iproute2 nftables ca-certificates xz-utils zstd git gpgv btrfs-progs e2fsprogs \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/dsec
COPY requirements.lock ./
RUN python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir --require-hashes --prefer-binary -r requirements.lock

COPY pyproject.toml README.md LICENSE ./
COPY dsec ./dsec
COPY libdsec ./libdsec
COPY config ./config
RUN /opt/venv/bin/pip install --no-cache-dir --no-deps --no-build-isolation . \
    && /opt/venv/bin/python -m dsec.backends.guest.build

ENV PATH=/opt/venv/bin:$PATH
VOLUME /var/lib/dsec
ENTRYPOINT ["dsec"]
CMD ["doctor"]
