// SPDX-License-Identifier: Apache-2.0

package main

import (
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/daemon"
	"github.com/sluice-lb/sluice/server"
)

func newRun(a *app) *cobra.Command {
	var o daemon.Options
	cmd := &cobra.Command{
		Use:     "run -c FILE",
		GroupID: "gateway",
		Short:   "Run the gateway in the foreground",
		Long: `Run in the foreground: apply a configuration, check the backends, watch the file
and serve the other commands.

SIGHUP and a change of the file reload it; a file with errors changes nothing.
Changes made by apply, backend and config are merged with the file and survive a
restart; 'sluice config diff' shows them.
SIGTERM and Ctrl-C end the daemon and restore the host; with --keep the rules stay
in the kernel and traffic continues. After kill -9 the rules stay too, and the
next start takes them over without an interruption.

With --listen the daemon also listens on TCP, for Prometheus and 'sluice show
--server'. It serves only clients that authenticate there: by a certificate signed
by the CA of --client-ca, by a token of --token-file, or by both if both are
given. They may read everything, and change something only with --listen-changes.
Without --tls-cert and --tls-key it listens on loopback addresses only. A changed
file takes effect with the next request; if it has an error, the previous content
stays in force. --listen does not change who may use the socket.

With --nftlb-api clients of nftlb, the nftables load balancer, manage farms,
backends and policies here as they do there. Their farms become services whose
names begin with nftlb-.`,
		Example: `  sluice run -c /etc/sluice/sluice.yaml
  ip netns exec gateway sluice run -c lb-dnat.yaml
  sluice run -c sluice.yaml --listen 127.0.0.1:9443 --token-file token
  sluice run -c sluice.yaml --listen :9443 --tls-cert cert.pem \
      --tls-key key.pem --client-ca ca.pem
  sluice run -c sluice.yaml --nftlb-api 127.0.0.1:5555 --nftlb-key key`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.File == "" {
				return usageError(cmd, "name the configuration with -c FILE")
			}
			if o.TCP.Address == "" {
				if o.TCP != (server.TCPOptions{}) {
					return usageError(cmd, "--tls-cert, --tls-key, --client-ca, --token-file and --listen-changes go with --listen ADDRESS:PORT")
				}
			} else if err := o.TCP.Check(); err != nil {
				return usageError(cmd, "%w", err)
			}
			if err := o.Nftlb.Check(); err != nil {
				return usageError(cmd, "%w", err)
			}
			o.Paths, o.Version, o.Log = a.paths, version(), a.logger()
			return daemon.Run(cmd.Context(), o)
		},
	}
	flags := cmd.Flags()
	flags.StringVarP(&o.File, "config", "c", "", "configuration file")
	flags.StringVar(&o.Node, "node", "", "name of this host in the cluster, instead of the host name")
	flags.BoolVar(&o.Keep, "keep", false, "leave the rules in the kernel at the end")
	flags.BoolVar(&o.Verbose, "verbose", false, "log every change of every object")
	flags.StringVar(&o.TCP.Address, "listen", "", "listen on TCP too, at ADDRESS:PORT, or :PORT for all addresses")
	flags.StringVar(&o.TCP.Files.Cert, "tls-cert", "", "with --listen: the daemon's certificate and its chain to the CA, PEM")
	flags.StringVar(&o.TCP.Files.Key, "tls-key", "", "with --listen: key of that certificate, PEM")
	flags.StringVar(&o.TCP.Files.ClientCA, "client-ca", "", "with --listen: CA of the certificates that clients must present, PEM")
	flags.StringVar(&o.TCP.Files.Tokens, "token-file", "", "with --listen: file of tokens; clients must send one of them")
	flags.BoolVar(&o.TCP.Changes, "listen-changes", false, "with --listen: clients over TCP may also change and stop the gateway")
	flags.StringVar(&o.Nftlb.Address, "nftlb-api", "", "answer the API of nftlb too, at ADDRESS:PORT")
	flags.StringVar(&o.Nftlb.Key, "nftlb-key", "", "with --nftlb-api: file of the key that its clients have to send")
	for _, name := range []string{"nftlb-key", "tls-cert", "tls-key", "client-ca", "token-file"} {
		_ = cmd.MarkFlagFilename(name)
	}
	_ = cmd.MarkFlagFilename("config", "yaml", "yml")
	return cmd
}

// logger returns the log of the daemon.
func (a *app) logger() *slog.Logger {
	if a.json {
		return slog.New(slog.NewJSONHandler(a.stderr, nil))
	}
	return slog.New(slog.NewTextHandler(a.stderr, &slog.HandlerOptions{ReplaceAttr: shortTime}))
}

// shortTime omits the date, which journals and terminals add.
func shortTime(groups []string, attr slog.Attr) slog.Attr {
	if attr.Key == slog.TimeKey && len(groups) == 0 {
		return slog.String(slog.TimeKey, attr.Value.Time().Format("15:04:05.000"))
	}
	return attr
}
