#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs the Debian packages that tests (test), development (dev) or the
# comparison with others (bench) need and that this machine lacks. Does nothing
# where all are there.
set -eu

test_packages="nftables iptables iproute2 nginx-light apache2-utils conntrack ethtool tmux tcpdump iperf3 procps curl bash-completion zsh fish natpmpc dnsmasq-base openvpn nftlb bird2 frr keepalived etcd-server"
dev_packages="clang-19 llvm-19 libbpf-dev linux-libc-dev qemu-system-x86 linux-image-cloud-amd64 busybox-static cpio"
bench_packages="haproxy tayga libnginx-mod-stream"

case "${1:-test}" in
test) want=$test_packages ;;
dev) want="$test_packages $dev_packages" ;;
bench) want="$test_packages $bench_packages" ;;
*) echo "usage: $0 test|dev|bench" >&2; exit 64 ;;
esac

missing=""
for p in $want; do
	dpkg-query -W -f '${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing="$missing $p"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
	echo "missing packages:$missing: install them, or run this as root on Debian 12; tests that need them will be skipped" >&2
	exit 0
fi
echo "installing:$missing"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# A package must not start its server on the machine of whoever runs the tests.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
	printf '#!/bin/sh\nexit 101\n' >$policy
	chmod +x $policy
	trap 'rm -f $policy' EXIT
fi
# shellcheck disable=SC2086
apt-get install -y -qq --no-install-recommends $missing >/dev/null
