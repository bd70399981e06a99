// SPDX-License-Identifier: Apache-2.0

package casestudy

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/doctor/faults"
)

// nginxInDocker answers every request at once, from one worker.
const nginxInDocker = `daemon off;
pid /tmp/pid;
user root root;
error_log /tmp/error.log;
worker_processes 1;
events { worker_connections 20000; }
http {
	access_log off;
	client_body_temp_path /tmp/body;
	proxy_temp_path /tmp/proxy;
	fastcgi_temp_path /tmp/fastcgi;
	uwsgi_temp_path /tmp/uwsgi;
	scgi_temp_path /tmp/scgi;
	server {
		listen 8080 backlog=65535;
		location / { return 200 "sluice\n"; }
	}
}
`

// playDocker runs the case with a container port published by Docker. Docker's own rules translate in every run
// except the last, which puts the eBPF datapath in front of the same container.
func (s *study) playDocker(ctx context.Context) (err error) {
	docker, err := faults.StartDocker(ctx, s.lab.Node("gateway"), "nft")
	if err != nil {
		return fmt.Errorf("case study: %w", err)
	}
	defer func() { err = errors.Join(err, docker.Stop()) }()
	address, err := s.container(ctx, docker)
	if err != nil {
		return fmt.Errorf("case study: %w", err)
	}
	s.Progress("taking the host's settings; while another program holds them, this waits")
	restore, err := borrow(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, restore()) }()
	s.Progress("before: %d connections at once to %s", s.Connections, s.report.Server)
	before, err := s.measure(ctx, "before", "published by Docker", url, 0)
	if err != nil {
		return err
	}
	if before.Complete == 0 {
		return errors.New("case study: the container answers nothing")
	}
	if err := s.forget(ctx); err != nil {
		return fmt.Errorf("case study: empty the gateway's table: %w", err)
	}
	if err := s.collapse(ctx); err != nil {
		return err
	}
	return s.beyond(ctx, address, "8080")
}

// container starts the server: nginx, or busybox where that is not installed. It returns the container's address.
func (s *study) container(ctx context.Context, docker *faults.Docker) (address string, err error) {
	program, files := "nginx", map[string]string{"/nginx.conf": nginxInDocker, "/etc/passwd": "root:x:0:0::/:/\n", "/etc/group": "root:x:0:\n"}
	words := []string{"/bin/nginx", "-e", "/tmp/error.log", "-c", "/nginx.conf"}
	if _, err := exec.LookPath(program); err != nil {
		program, files, words = "busybox", nil, []string{"/bin/busybox", "httpd", "-f", "-p", "8080"}
	}
	s.report.Server = program + " in a container of Docker, -p 8080:8080"
	if err := docker.Image(ctx, "web", []string{program}, files); err != nil {
		return "", err
	}
	var openFiles unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &openFiles); err != nil {
		return "", err
	}
	limit := min(openFiles.Max, 65535)
	id, err := docker.Run(ctx, append([]string{"run", "-d", "-p", "8080:8080", "--ulimit", fmt.Sprintf("nofile=%d:%d", limit, limit),
		"--sysctl", "net.core.somaxconn=65535", "--sysctl", "net.ipv4.tcp_max_syn_backlog=65535", "web"}, words...)...)
	if err != nil {
		return "", err
	}
	found, err := docker.Run(ctx, "inspect", "-f", "{{.State.Pid}} {{.NetworkSettings.IPAddress}}", id)
	if err != nil {
		return "", err
	}
	pid, address, _ := strings.Cut(found, " ")
	s.server = "/proc/" + pid + "/ns/net"
	return address, s.answers(ctx, faults.Gateway+":8080", func() string {
		log, err := docker.Run(ctx, "logs", id)
		return fmt.Sprint(log, " ", err)
	})
}
