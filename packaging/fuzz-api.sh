#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Sends random requests to every operation of the API of a running daemon, made from its OpenAPI
# document, and judges the answers: no server error, no status, header or content that is not
# documented, no valid document that is refused.
#
#   packaging/fuzz-api.sh [SLUICE [EXAMPLES]]
#
# SLUICE is the program (default ./sluice), EXAMPLES how many requests are made of each operation and
# kind at most (default 30). It needs root, and schemathesis ("pip install schemathesis", or its path
# in SCHEMATHESIS). The daemon runs in network and mount namespaces of its own. Two operations are not
# for this: stop ends the daemon, and the stream of events has no end.
set -eu

sluice=$(realpath "${1:-./sluice}")
examples=${2:-30}
schemathesis=${SCHEMATHESIS:-schemathesis}
command -v "$schemathesis" >/dev/null || { echo "fuzz-api: schemathesis is not installed: pip install schemathesis" >&2; exit 77; }
if [ -z "${FUZZ_INSIDE:-}" ]; then
	FUZZ_INSIDE=1 exec unshare --net --mount --propagation private "$0" "$sluice" "$examples"
fi

mount -t tmpfs tmpfs /run
mkdir -p /run/sluice
mount -t sysfs sysfs /sys
mount -t bpf bpf /sys/fs/bpf
ip link set lo up
ip link add wan0 type veth peer name far0
ip link add lan0 type veth peer name near0
for link in wan0 far0 lan0 near0; do ip link set "$link" up; done
ip addr add 192.0.2.1/24 dev wan0
ip addr add 10.0.2.1/24 dev lan0

dir=$(mktemp -d)
trap 'kill "$daemon" 2>/dev/null; wait "$daemon" 2>/dev/null; rm -rf "$dir"' EXIT
cat >"$dir/sluice.yaml" <<EOF
tables: {flows: 65536, flows6: 4096}
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, backends: [{name: a, address: 10.0.2.2}, {name: b, address: 10.0.2.3}]}
nat:
  - {name: office, type: masquerade, source: [10.0.2.0/24], out: wan0}
firewall:
  sets: {banned: [198.51.100.0/24]}
EOF
(umask 077 && echo 0123456789abcdef0123456789abcdef0123456789abcdef >"$dir/token")
"$sluice" run -c "$dir/sluice.yaml" --state-dir "$dir/state" --listen 127.0.0.1:9443 --token-file "$dir/token" --listen-changes 2>"$dir/log" &
daemon=$!
for _ in $(seq 100); do
	if grep -q ready "$dir/log"; then break; fi
	sleep 0.1
done
# A configuration, an address or a protocol may satisfy the schema, and still be none that this gateway
# can have, and a drain that resets needs an end: these operations answer 422 to it, and no others.
# Whether it is ready the gateway says by 503.
cat >"$dir/schemathesis.toml" <<EOF
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "404", "409", "412", "503"]
[[operations]]
include-operation-id-regex = "^(add|put|patch|remove)-|^(change|apply|plan|explain|start-drain|set-backend|list-flows|list-api-v1-flows|stream-flows)$"
checks.positive_data_acceptance.expected-statuses = ["2xx", "404", "409", "412", "422", "503"]
[[operations]]
include-operation-id = "ready"
checks.not_a_server_error.expected-statuses = ["2xx", "4xx", "503"]
EOF
cd "$dir" # where schemathesis leaves its notes
status=0
"$schemathesis" --config-file "$dir/schemathesis.toml" run http://127.0.0.1:9443/openapi.json -H "Authorization: Bearer $(cat "$dir/token")" \
	--exclude-path /api/v1/stop --exclude-path /api/v1/events --max-examples "$examples" --phases examples,coverage,fuzzing \
	--checks not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,response_schema_conformance,positive_data_acceptance,missing_required_header \
	--continue-on-failure --request-timeout 30 --suppress-health-check all || status=$?
if ! kill -0 "$daemon"; then
	echo "fuzz-api: the daemon has ended:" >&2
	tail -50 "$dir/log" >&2
	status=1
fi
exit "$status"
