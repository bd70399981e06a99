#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes, in the working directory, the certificates for "sluice run --listen" and a client:
#   ca.pem, ca.key          a CA for this alone: whoever has its key can let clients in
#   gateway.pem, .key       for --tls-cert and --tls-key
#   prometheus.pem, .key    for a client, or for those that CLIENTS names
# The arguments are the names and addresses by which clients reach the gateway. A CA that is there is
# used again: so one renews, or makes more.  OpenSSL 3.
#   certificates.sh gw1.example.org 192.0.2.1 2001:db8::1
set -eu
umask 077
[ $# -gt 0 ] || { echo "usage: $0 NAME-OR-ADDRESS..." >&2; exit 64; }

names=""
for n; do
	case $n in
	*:* | *.*[0-9]) names="$names,IP:$n" ;;
	*) names="$names,DNS:$n" ;;
	esac
done

request() { openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -subj "/CN=$1" -keyout "$2.key.new"; }
sign() { # extensions, file, days, what signs
	file=$2 days=$3 extensions=$1
	shift 3
	printf '%s\n' "$extensions" >extensions.new
	openssl x509 -req "$@" -days "$days" -extfile extensions.new -out "$file.pem.new"
	mv "$file.key.new" "$file.key"
	mv "$file.pem.new" "$file.pem"
	rm extensions.new
}

if [ ! -e ca.key ]; then
	request "Sluice clients and gateways" ca >request.new
	sign "basicConstraints=critical,CA:TRUE,pathlen:0
keyUsage=critical,keyCertSign" ca 3650 -in request.new -signkey ca.key.new
fi
request "$1" gateway >request.new
sign "basicConstraints=critical,CA:FALSE
extendedKeyUsage=serverAuth
subjectAltName=${names#,}" gateway 365 -in request.new -CA ca.pem -CAkey ca.key
for client in ${CLIENTS:-prometheus}; do
	request "$client" "$client" >request.new
	sign "basicConstraints=critical,CA:FALSE
extendedKeyUsage=clientAuth" "$client" 365 -in request.new -CA ca.pem -CAkey ca.key
done
rm request.new
