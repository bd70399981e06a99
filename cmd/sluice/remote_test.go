// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestFlagsOverTCP: errors in the command line are reported before any request.
func TestFlagsOverTCP(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nobody := "http://" + l.Addr().String()
	l.Close()
	dir := t.TempDir()
	at := func(name, text string) string {
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	token := at("token", "correct-horse-battery-staple")
	config := at("sluice.yaml", "nat: [{name: out, type: masquerade, source: [10.0.2.0/24], out: wan0}]\n")
	for _, c := range []struct {
		args string
		code int
		says string
	}{
		{"run -c x.yaml --listen 127.0.0.1:9443", exitUsage, "whoever reaches it would be served"},
		{"run -c x.yaml --listen 192.0.2.1:9443 --token-file " + token, exitUsage, "in clear"},
		{"run -c x.yaml --listen 127.0.0.1:9443 --client-ca ca.pem", exitUsage, "certificates are a part of TLS"},
		{"run -c x.yaml --token-file " + token, exitUsage, "go with --listen ADDRESS:PORT"},
		{"run -c x.yaml --listen-changes", exitUsage, "go with --listen ADDRESS:PORT"},
		{"run -c x.yaml --server https://192.0.2.1:9443", exitUsage, "unknown flag"},
		{"show --token-file " + token, exitUsage, "go with --server https://HOST:PORT"},
		{"show flows --server " + nobody + " --socket x", exitUsage, "--socket and --state-dir are of the daemon's own host"},
		{"backend web a drain --server " + nobody + " --state-dir x", exitUsage, "--socket and --state-dir"},
		{"stop --force --server " + nobody, exitUsage, "--server names another one"},
		{"show --server http://192.0.2.1:9443 --token-file " + token, exitUsage, "--server: \"http://192.0.2.1:9443\": the token would be sent in clear"},
		{"show flows --server http://localhost:9443", exitUsage, "in clear"},
		{"show --server gw1:9443", exitUsage, "write https://HOST:PORT"},
		{"show --server https://:9443", exitUsage, "write https://HOST:PORT"},
		{"show --server https://gw1:99999", exitUsage, "ports are 1 to 65535"},
		{"show --server https://gw1:https", exitUsage, "write https://HOST:PORT"},
		{"show --server https://gw1:9443/api", exitUsage, "write https://HOST:PORT"},
		{"stop --server=", exitUsage, "--server: \"\": write https://HOST:PORT"},
		{"show --server " + nobody + " --cert " + token, exitUsage, "--cert FILE and --key FILE belong together"},
		{"show backends --server " + nobody + " --token-file " + token, exitFailure, "no daemon answers on " + nobody},
		{"stop --server " + nobody + " --token-file " + token, exitFailure, "no daemon answers on " + nobody},
		{"explain tcp 192.0.2.1:1 192.0.2.2:2 --server " + nobody, exitFailure, "no daemon answers on " + nobody},
		{"apply --server " + nobody + " " + config, exitFailure, "no daemon answers on " + nobody},
		// The state of another host's kernel cannot be compared here.
		{"diff --server " + nobody + " " + config, exitFailure, "no daemon answers on " + nobody},
	} {
		var out bytes.Buffer
		if code := execute(t.Context(), strings.Fields(c.args), nil, &out, &out); code != c.code || !strings.Contains(out.String(), c.says) {
			t.Errorf("%s: exit code %d, %s", c.args, code, out.String())
		}
		if strings.Contains(out.String(), "comparing with the kernel") {
			t.Errorf("%s: %s", c.args, out.String())
		}
	}
}
