// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"log/slog"
	"net/http"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/engine"
)

// datapaths are those that this host can run, preferred first.
type datapaths struct{ list []datapath.Datapath }

func (d *datapaths) names() []string {
	var names []string
	for _, p := range d.list {
		names = append(names, p.Name())
	}
	return names
}

func openDatapaths(dir string, log *slog.Logger) (*datapaths, error) {
	return nil, errors.New("no datapath is available on this host")
}

type monitor struct{}

func newMonitor(*daemon) *monitor                             { return &monitor{} }
func (*monitor) Close()                                       {}
func (*monitor) Configure(*config.Config)                     {}
func (*monitor) Healthy(string, string) (healthy, known bool) { return true, true }
func (*monitor) Why(string, string) string                    { return "" }

func metricsHandler(*engine.Engine) http.Handler { return nil }
