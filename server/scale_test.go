// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/control"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf"
	"github.com/sluice-lb/sluice/datapath/nft"
	"github.com/sluice-lb/sluice/engine"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/server"
	"github.com/sluice-lb/sluice/store"
)

// farm returns a configuration of n services with three backends each.
func farm(n int, datapath string) []byte {
	var b strings.Builder
	fmt.Fprintf(&b, "datapath: %s\ntables: {flows: 65536, flows6: 4096}\nservices:\n", datapath)
	for i := range n {
		fmt.Fprintf(&b, "  - name: s%d\n    listen: [{address: %s, ports: [80]}]\n    protocol: tcp\n    mode: dnat\n    scheduler: wrr\n    backends:\n", i,
			netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)}))
		for k := range 3 {
			fmt.Fprintf(&b, "      - {name: b%d, address: 10.0.2.%d, port: %d}\n", k, 2+k, 1024+i)
		}
	}
	return []byte(b.String())
}

// daemonOf runs the daemon's layers from the API to the kernel in a node of a lab.
func daemonOf(b testing.TB, n *lab.Node, force string, services int) *api.Client {
	b.Helper()
	dir := b.TempDir()
	file := filepath.Join(dir, "sluice.yaml")
	if err := os.WriteFile(file, farm(services, force), 0o600); err != nil {
		b.Fatal(err)
	}
	cfg, err := config.Load(file)
	if err != nil {
		b.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	var paths []datapath.Datapath
	err = n.Do(func() error {
		e, err := ebpf.Open(ebpf.Options{StateDir: dir, Log: log})
		if err != nil {
			return err
		}
		f, err := nft.Open()
		paths = []datapath.Datapath{e, f}
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	changes, err := store.Open(filepath.Join(dir, "store"), file)
	if err != nil {
		b.Fatal(err)
	}
	e := engine.New(engine.Options{Datapaths: paths, Log: log})
	b.Cleanup(func() {
		if err := e.Stop(context.Background(), false); err != nil {
			b.Error(err)
		}
	})
	c := control.New(file, changes, e, log)
	if err := c.Start(b.Context(), cfg); err != nil {
		b.Fatal(err)
	}
	socket := filepath.Join(dir, "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		b.Fatal(err)
	}
	local := server.NewLocal(l, log)
	go func() {
		_ = local.Serve(b.Context(), server.New(server.Options{Engine: e, Control: c, Version: "test", File: file}))
	}()
	b.Cleanup(func() { _ = l.Close() })
	return api.NewClient(socket)
}

// BenchmarkChange measures two requests to a daemon with 10,000 services of three backends: one change of a
// backend until its response, which follows the read-back from the kernel, and the list of all services.
func BenchmarkChange(b *testing.B) {
	labtest.Require(b, labtest.Root, labtest.BPF)
	const services = 10_000
	for _, force := range []string{"nftables", "ebpf"} {
		b.Run(force, func(b *testing.B) {
			l := labtest.New(b, lab.Balancer())
			c := daemonOf(b, l.Node("gateway"), force, services)
			patch := func(n int, key string, value any) {
				path := fmt.Sprintf("services/s%d/backends/b%d", n%services, n%3)
				if _, err := c.Change(b.Context(), []api.ObjectChange{{Op: "patch", Path: path, Value: map[string]any{key: value}}}, false); err != nil {
					b.Error(err)
				}
			}
			b.Run("list", func(b *testing.B) {
				for b.Loop() {
					if list, err := c.Services(b.Context()); err != nil || len(list) != services {
						b.Fatal(len(list), err)
					}
				}
			})
			n := 0
			b.Run("weight", func(b *testing.B) {
				for b.Loop() {
					n += 7
					patch(n, "weight", 2+n%5)
				}
			})
			b.Run("weights-of-25-clients", func(b *testing.B) { // the time per change is the total time divided by the number of changes
				var at atomic.Int64
				var clients sync.WaitGroup
				for range 25 {
					clients.Go(func() {
						for n := at.Add(1); n <= int64(b.N); n = at.Add(1) {
							patch(int(7*n), "weight", 2+int(n%200))
						}
					})
				}
				clients.Wait()
			})
			b.Run("address", func(b *testing.B) {
				for b.Loop() {
					n += 7
					patch(n, "address", fmt.Sprintf("10.0.2.%d", 10+n%80))
				}
			})
			b.Run("state", func(b *testing.B) {
				for b.Loop() {
					n += 7
					if err := c.SetBackend(b.Context(), fmt.Sprintf("s%d", n%services), "b1", api.BackendState{State: []string{"drain", "down", "up"}[n%3]}); err != nil {
						b.Fatal(err)
					}
				}
			})
		})
	}
}
