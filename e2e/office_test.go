// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestLabUpOffice: "sluice lab up office" runs the whole router. DHCP, the VPN, NAT and a published server work, and
// without a program the command reports its absence.
func TestLabUpOffice(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Nftables, labtest.Conntrack, labtest.Tool("curl"))
	for _, without := range []string{"", "dnsmasq", "openvpn"} {
		t.Run("without "+without, func(t *testing.T) {
			if without == "" {
				labtest.Require(t, labtest.Tool("dnsmasq"), labtest.Tool("openvpn"))
			}
			path := "PATH=" + pathWithout(t, without)
			sluice := func(args ...string) string {
				cmd := exec.Command(binary, args...)
				cmd.Env = append(os.Environ(), path)
				out, err := cmd.Output()
				if err != nil {
					t.Fatalf("%v: %v: %s", args, err, err.(*exec.ExitError).Stderr)
				}
				return string(out)
			}
			var up struct {
				ID    string
				Nodes []struct {
					Name   string
					Absent []string
				}
			}
			if err := json.Unmarshal([]byte(sluice("lab", "up", "office", "--json")), &up); err != nil {
				t.Fatal(err)
			}
			defer sluice("lab", "down", up.ID)
			absent := map[string]string{}
			for _, n := range up.Nodes {
				if len(n.Absent) > 0 {
					absent[n.Name] = strings.Join(n.Absent, ", ")
				}
			}
			type request struct{ node, url, want string }
			requests := []request{
				{"pc", "http://203.0.113.10/", "outside 211.155.226.121:"},
				{"outside", "http://211.155.226.121/", "web 211.155.226.1:"},
			}
			switch without {
			case "dnsmasq":
				if len(absent) != 2 || absent["gateway"] != "dnsmasq:67: dnsmasq is not installed" || absent["laptop"] != "dhcp-client: dnsmasq is not installed" {
					t.Errorf("absent: %v", absent)
				}
			case "openvpn":
				if len(absent) != 2 || absent["gateway"] != "openvpn:1194: openvpn is not installed" || absent["outside"] != "openvpn-client: openvpn is not installed" {
					t.Errorf("absent: %v", absent)
				}
			default:
				if len(absent) != 0 {
					t.Errorf("absent: %v", absent)
				}
			}
			if without != "dnsmasq" {
				requests = append(requests, request{"laptop", "http://203.0.113.10/", "outside 211.155.226.121:"})
			}
			if without != "openvpn" {
				requests = append(requests, request{"outside", "http://10.1.10.2/", "web 10.8.0.2:"})
			}
			for _, r := range requests {
				if got := sluice("lab", "exec", up.ID, r.node, "--", "curl", "-sS", "-m", "30", r.url); !strings.HasPrefix(got, r.want) {
					t.Errorf("%s asks %s: %q, want %s", r.node, r.url, got, r.want)
				}
			}
		})
	}
}

// pathWithout returns a directory with links to all programs of $PATH except one.
func pathWithout(t *testing.T, program string) string {
	t.Helper()
	if program == "" {
		return os.Getenv("PATH")
	}
	dir := t.TempDir()
	for _, from := range filepath.SplitList(os.Getenv("PATH")) {
		files, _ := os.ReadDir(from) // a directory of $PATH need not exist
		for _, f := range files {
			if f.Name() != program {
				_ = os.Symlink(filepath.Join(from, f.Name()), filepath.Join(dir, f.Name())) // the first directory wins
			}
		}
	}
	return dir
}
