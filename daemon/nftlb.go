// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/control"
	"github.com/sluice-lb/sluice/nftlb"
	"github.com/sluice-lb/sluice/server"
)

// NftlbOptions are the address and the key file of the nftlb API.
type NftlbOptions struct {
	Address string
	Key     string // path of the key file
}

// Check returns an error if options for serving only clients with the key are missing.
func (o NftlbOptions) Check() error {
	if o.Address == "" {
		if o.Key != "" {
			return errors.New("--nftlb-key goes with --nftlb-api ADDRESS:PORT")
		}
		return nil
	}
	if _, err := netip.ParseAddrPort(o.Address); err != nil {
		return fmt.Errorf("--nftlb-api %s: write ADDRESS:PORT as in 127.0.0.1:5555 or [::1]:5555", o.Address)
	}
	if o.Key == "" {
		return fmt.Errorf("--nftlb-api %s: whoever reaches it would be served: name --nftlb-key FILE, with the key that clients have to send", o.Address)
	}
	return nil
}

// keyFile is a file with a key. A changed key is in effect with the next request. While the file is
// invalid, the previous key remains.
type keyFile struct {
	file string
	log  *slog.Logger

	mu  sync.Mutex
	key string
	bad string // last logged error
}

func (k *keyFile) read() error {
	raw, err := api.ReadSecret(k.file, 0o077)
	if err != nil {
		return fmt.Errorf("nftlb key %w", err)
	}
	key := strings.TrimRight(string(raw), "\r\n")
	if key == "" || strings.ContainsAny(key, "\r\n") {
		return fmt.Errorf("nftlb key %s: write one line with the key, as 'openssl rand -hex 16' makes one", k.file)
	}
	k.key = key
	return nil
}

// currentKey returns the key in force.
func (k *keyFile) currentKey() string {
	k.mu.Lock()
	defer k.mu.Unlock()
	text := ""
	if err := k.read(); err != nil {
		if text = err.Error(); text != k.bad {
			k.log.Error("the key of before stays", "error", err)
		}
	}
	k.bad = text
	return k.key
}

// nftlbServer answers the API of nftlb.
type nftlbServer struct {
	api    *nftlb.API
	server *server.Local
	addr   net.Addr
}

// newNftlb opens the listener. Requests are answered after serve.
func (d *daemon) newNftlb(ctx context.Context) (*nftlbServer, error) {
	o := d.Nftlb
	key := &keyFile{file: o.Key, log: d.Log}
	if err := key.read(); err != nil {
		return nil, err
	}
	var local *server.Local
	handler := nftlb.New(nftlb.Options{
		Network: nftlb.Host{}, Key: key.currentKey, Path: filepath.Join(d.ChangesDirectory(), "nftlb.json"), Log: d.Log,
		Refused: func(client, cause string) { local.Refused(client, cause) },
		InForce: func() *config.Config { return d.engine.Config() },
		Change: func(ctx context.Context, who, what string, make func(*config.Config) (*config.Config, error)) error {
			_, err := d.control.Change(ctx, control.Author{Who: who, What: what}, make)
			return err
		},
	})
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", o.Address)
	if err != nil {
		return nil, fmt.Errorf("--nftlb-api: %w", err)
	}
	if at := l.Addr().(*net.TCPAddr); !at.IP.IsLoopback() {
		d.Log.Warn("the API of nftlb has no encryption: whoever is on the way reads the key", "address", at)
	}
	local = server.NewPlain(l, d.Log)
	return &nftlbServer{api: handler, server: local, addr: l.Addr()}, nil
}
