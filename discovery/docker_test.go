// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// engine emulates Docker's answers about its containers and its events.
type engine struct {
	mu         sync.Mutex
	containers []map[string]any
	changes    chan struct{}
	filters    string
}

func (e *engine) set(containers ...map[string]any) {
	e.mu.Lock()
	e.containers = containers
	e.mu.Unlock()
	e.changes <- struct{}{}
}

func (e *engine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case "/containers/json":
		e.mu.Lock()
		defer e.mu.Unlock()
		e.filters = r.URL.Query().Get("filters")
		_ = json.NewEncoder(w).Encode(e.containers)
	case "/events":
		w.(http.Flusher).Flush()
		select {
		case <-e.changes:
			fmt.Fprintf(w, `{"Type":"container","Action":"start","timeNano":%d}`+"\n", time.Now().UnixNano())
		case <-r.Context().Done():
		}
	default:
		http.Error(w, `{"message":"page not found"}`, http.StatusNotFound)
	}
}

// one is a container as the engine lists it.
func one(name, address, status string, labels map[string]string) map[string]any {
	return map[string]any{"Id": "id-" + name, "Names": []string{"/" + name}, "State": "running", "Status": status, "Labels": labels,
		"NetworkSettings": map[string]any{"Networks": map[string]any{"bridge": map[string]any{"IPAddress": address}, "back": map[string]any{"IPAddress": "10.9.9.9"}}}}
}

func TestDockerEngine(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "docker") // short: sockets have paths of 108 bytes at most
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket := filepath.Join(dir, "sock")
	e := &engine{changes: make(chan struct{}, 1)}
	e.containers = []map[string]any{one("web-1", "10.0.0.1", "Up 2 minutes", nil), one("web-2", "10.0.0.2", "Up 1 second (health: starting)", nil),
		one("host", "", "Up 3 hours", nil)}
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: e}
	go func() { _ = server.Serve(l) }()
	t.Cleanup(func() { _ = server.Close() })
	f, s := following(t, "", "{docker: app=web, socket: "+socket+", network: bridge, port: 8080}")
	s.eventually(t, "web-1=10.0.0.1:8080")
	e.set(one("web-1", "10.0.0.1", "Up 3 minutes", nil), one("web-2", "10.0.0.2", "Up 1 minute (healthy)", map[string]string{"sluice.port": "81", "sluice.weight": "9"}))
	s.eventually(t, "web-1=10.0.0.1:8080", "web-2=10.0.0.2:81*9/1")
	e.set(one("web-1", "10.0.0.1", "Up 3 minutes (unhealthy)", nil), one("web-2", "10.0.0.2", "Up 1 minute (healthy)", nil))
	s.eventually(t, "web-2=10.0.0.2:8080")
	if e.mu.Lock(); e.filters != `{"label":["app=web"],"status":["running"]}` {
		t.Errorf("asked for %s", e.filters)
	}
	e.mu.Unlock()
	_ = server.Close()
	labtest.Eventually(t, 40*time.Second, "a warning", warned(f, "the last result remains in force"))
	if err := s.has("web-2=10.0.0.2:8080"); err != nil {
		t.Error(err)
	}
}

// startDocker runs dockerd with its own control group file systems, because the node's /sys hides the host's. $0 is
// the base of its files.
const startDocker = `mount -t tmpfs none /sys/fs/cgroup
for c in $(awk 'NR > 1 && $2 > 0 { print $1 }' /proc/cgroups); do mkdir /sys/fs/cgroup/$c; mount -t cgroup -o $c none /sys/fs/cgroup/$c || rmdir /sys/fs/cgroup/$c; done
[ -n "$(ls /sys/fs/cgroup)" ] || mount -t cgroup2 none /sys/fs/cgroup
exec dockerd --data-root $0/data --exec-root $0/run --pidfile $0/pid -H unix://$0/sock --storage-driver vfs`

// TestDocker follows the containers of a real daemon as they start and end.
func TestDocker(t *testing.T) {
	if os.Getenv("SLUICE_DOCKER") == "" {
		t.Skip("SLUICE_DOCKER=1 starts a Docker daemon")
	}
	labtest.Require(t, labtest.Root)
	for _, tool := range []string{"dockerd", "docker", "busybox"} {
		labtest.Require(t, labtest.Tool(tool))
	}
	base, err := os.MkdirTemp("", "docker")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(base) })
	log, err := os.Create(filepath.Join(base, "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	daemon := exec.Command("ip", "netns", "exec", labtest.New(t, lab.Balancer()).Node("gateway").Name(), "unshare", "-m", "sh", "-ec", startDocker, base)
	daemon.Stdout, daemon.Stderr = log, log
	if err := daemon.Start(); err != nil {
		t.Fatal(err)
	}
	client := func(args ...string) (string, error) {
		text, err := exec.Command("docker", append([]string{"-H", "unix://" + base + "/sock"}, args...)...).CombinedOutput()
		return strings.TrimSpace(string(text)), err
	}
	t.Cleanup(func() {
		if ids, _ := client("ps", "-aq"); ids != "" {
			_, _ = client(append([]string{"rm", "-f"}, strings.Fields(ids)...)...)
		}
		_ = daemon.Process.Signal(os.Interrupt)
		_ = daemon.Wait()
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("%s", text)
		}
	})
	labtest.Eventually(t, 40*time.Second, "an answer of dockerd", func() error {
		_, err := client("info")
		return err
	})
	docker := func(args ...string) string {
		t.Helper()
		text, err := client(args...)
		if err != nil {
			t.Fatalf("docker %s: %v: %s", strings.Join(args, " "), err, text)
		}
		return text
	}
	image := exec.Command("sh", "-ec", "mkdir -p $0/tree/bin; cp $(command -v busybox) $0/tree/bin; tar -C $0/tree -cf $0/own.tar .", base)
	if text, err := image.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	docker("import", base+"/own.tar", "own")
	run := func(name string, args ...string) string {
		t.Helper()
		docker(append(append([]string{"run", "-d", "--name", name}, args...), "own", "/bin/busybox", "sleep", "600")...)
		return docker("inspect", "-f", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", name)
	}
	first := run("web-1", "--label", "app=web")
	run("other")
	f, s := following(t, "", "{docker: app=web, socket: "+base+"/sock, port: 8080}")
	s.eventually(t, "web-1="+first+":8080")
	second := run("web-2", "--label", "app=web", "--label", "sluice.port=81")
	s.eventually(t, "web-1="+first+":8080", "web-2="+second+":81")
	docker("kill", "web-1")
	s.eventually(t, "web-2="+second+":81")
	docker("kill", "web-2")
	labtest.Eventually(t, 20*time.Second, "a warning", warned(f, "stay because of least"))
	if err := s.has("web-2=" + second + ":81"); err != nil {
		t.Error(err)
	}
	docker("start", "web-1")
	again := docker("inspect", "-f", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", "web-1")
	s.eventually(t, "web-1="+again+":8080")
}
