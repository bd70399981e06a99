// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"

	"github.com/sluice-lb/sluice/config"
)

// identify returns the node of a configuration that this host is, or "" for a configuration without nodes.
func (e *Engine) identify(c *config.Config) (string, error) {
	switch {
	case e.opt.Node != nil:
		return e.opt.Node(c)
	case len(c.Nodes()) > 0:
		return "", errors.New("cluster.nodes: this program applies configurations of single gateways only")
	}
	return "", nil
}
