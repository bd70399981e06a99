// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/doctor/faults"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/published"
)

// dockerHost is a lab with a real Docker engine on its gateway.
type dockerHost struct {
	*testing.T
	ctx    context.Context
	lab    *lab.Lab
	engine *faults.Docker
}

// startDocker starts an engine with one kind of iptables and an image that serves HTTP on port 8080.
func startDocker(t *testing.T, kind string, options ...string) dockerHost {
	t.Helper()
	if os.Getenv("SLUICE_DOCKER") == "" {
		t.Skip("SLUICE_DOCKER=1 starts a Docker daemon")
	}
	labtest.Require(t, labtest.Root, labtest.Nftables, labtest.Conntrack)
	for _, tool := range []string{"dockerd", "docker", "busybox", "curl", "iptables-nft", "iptables-legacy"} {
		labtest.Require(t, labtest.Tool(tool))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	l := labtest.New(t, faults.Topology("docker"))
	engine, err := faults.StartDocker(ctx, l.Node("gateway"), kind, options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := engine.Stop(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Log(engine.Log())
		}
	})
	if err := engine.Image(ctx, "web", []string{"busybox"}, map[string]string{"/www/index.html": "container\n"}); err != nil {
		t.Fatal(err)
	}
	return dockerHost{t, ctx, l, engine}
}

// serve runs a container with the options and returns its address.
func (h dockerHost) serve(options ...string) string {
	h.Helper()
	args := append([]string{"run", "-d"}, options...)
	id, err := h.engine.Run(h.ctx, append(args, "web", "/bin/busybox", "httpd", "-f", "-p", "8080", "-h", "/www")...)
	if err != nil {
		h.Fatal(err)
	}
	address, err := h.engine.Run(h.ctx, "inspect", "-f", "{{.NetworkSettings.IPAddress}}", id)
	if err != nil {
		h.Fatal(err)
	}
	return address
}

// answers waits until the client gets the container's page from the gateway.
func (h dockerHost) answers() {
	h.Helper()
	labtest.Eventually(h.T, patience, "an answer of the container", func() error {
		out, err := h.lab.Node("client").Command(h.ctx, "curl", "-sS", "-m", "2", "http://"+faults.Gateway+":8080/").CombinedOutput()
		if err != nil || string(out) != "container\n" {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
}

// TestDockerWays puts Sluice in front of containers in the three ways of the documentation, on both datapaths:
// for a published port, for containers without one, and as a replacement of Docker's rules.
func TestDockerWays(t *testing.T) {
	onDatapaths(t, func(t *testing.T, force string) {
		service := "services:\n  - name: web\n    listen: [{address: " + faults.Gateway + ", ports: [8080]}]\n    protocol: tcp\n    mode: dnat\n"
		t.Run("published", func(t *testing.T) {
			h := startDocker(t, "nft")
			address := h.serve("-p", "8080:8080")
			d := start(t, h.lab.Node("gateway"), force+service+"    backends: [{name: a, address: "+address+", port: 8080}]\n")
			h.answers()
			h.translated(d.Command(h.ctx, "show", "services", "--json").Output())
		})
		t.Run("discovered", func(t *testing.T) {
			h := startDocker(t, "nft")
			h.serve("--label", "app=web")
			accept := h.lab.Node("gateway").Command(h.ctx, "iptables-nft", "-I", "DOCKER-USER", "-d", "172.17.0.0/16", "-j", "ACCEPT")
			if out, err := accept.CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			d := start(t, h.lab.Node("gateway"), force+service+"    backends-from: {docker: app=web, socket: "+h.engine.Socket()+", port: 8080}\n")
			h.answers()
			h.translated(d.Command(h.ctx, "show", "services", "--json").Output())
		})
		t.Run("instead", func(t *testing.T) {
			h := startDocker(t, "nft", "--iptables=false")
			address := h.serve()
			start(t, h.lab.Node("gateway"), force+"nat:\n  - {name: out, type: masquerade, source: [172.17.0.0/16], out: lan0}\n"+
				"  - {name: web, type: port-forward, listen: {address: "+faults.Gateway+", ports: [8080]}, protocol: tcp, to: {address: "+address+", port: 8080}}\n")
			h.answers()
			serveWeb(t, h.lab, "server outside "+faults.Server+":80")
			out, err := h.engine.Run(h.ctx, "run", "--rm", "web", "/bin/busybox", "wget", "-q", "-O", "-", "http://"+faults.Server+"/")
			if err != nil || !strings.HasPrefix(out, "outside ") || strings.Contains(out, "172.17.") {
				t.Errorf("a container asks a server outside: %v: %s", err, out)
			}
		})
	})
}

// translated fails unless a service has counted packets.
func (h dockerHost) translated(out []byte, err error) {
	h.Helper()
	if err != nil || !strings.Contains(string(out), `"packets"`) || strings.Contains(string(out), `"packets": 0,`) {
		h.Errorf("Sluice has not translated: %v: %s", err, out)
	}
}

// TestDiscoverDocker lists the ports of a real engine with the path of each, and measures them.
func TestDiscoverDocker(t *testing.T) {
	for _, c := range []struct {
		kind    string
		options []string
		path    string
	}{
		{"nft", nil, published.NFT}, {"legacy", nil, published.Legacy},
		{"nft", []string{"--iptables=false", "--userland-proxy=true"}, published.Proxy},
		{"nft", []string{"--iptables=false"}, published.None},
	} {
		t.Run(c.path, func(t *testing.T) {
			h := startDocker(t, c.kind, c.options...)
			h.serve("-p", "8080:8080", "-p", "5353:53/udp", "--name", "web")
			out, err := h.lab.Node("gateway").Command(h.ctx, binary, "discover", "docker", "--check", "--json", "--engine", h.engine.Socket()).Output()
			if err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			var ports []published.Port
			if err := json.Unmarshal(out, &ports); err != nil {
				t.Fatal(err)
			}
			seen := map[string]string{}
			for _, p := range ports {
				if !p.Address.Is4() {
					continue
				}
				seen[p.String()] = p.Container + " " + p.Path
				if measured := p.Cost != nil && p.Cost.Connections > 0; measured != (p.Protocol == "tcp" && p.Path != published.None) || measured == (p.NotMeasured != "") {
					t.Errorf("%s: cost %+v, not measured: %q", p, p.Cost, p.NotMeasured)
				}
			}
			if len(seen) != 2 || seen["8080/tcp"] != "web "+c.path || seen["5353/udp"] != "web "+c.path {
				t.Errorf("ports %v, want 8080/tcp and 5353/udp of web by %s\n%s", seen, c.path, out)
			}
			text, err := h.lab.Node("gateway").Command(h.ctx, binary, "discover", "docker", "--check", "--engine", h.engine.Socket()).Output()
			if err != nil || !strings.Contains(string(text), "web") {
				t.Errorf("%v: %s", err, text)
			}
			for line := range strings.Lines(string(text)) {
				if len([]rune(line)) > 81 {
					t.Errorf("%d columns: %s", len([]rune(line))-1, line)
				}
			}
			t.Logf("\n%s", text)
		})
	}
}
