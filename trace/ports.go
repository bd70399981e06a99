// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/sluice-lb/sluice/flow"
)

// LocalPort is a port of the host where a program waits for others.
type LocalPort struct {
	Protocol flow.Protocol
	Port     uint16
}

// AskedPorts are the ports that programs in the calling thread's network namespace
// asked for by number, of TCP listeners and of UDP sockets without a remote side.
// Those that the kernel chose are left out: of a resolver, a QUIC client, or a
// program that listens on port 0.
func AskedPorts() (map[LocalPort]bool, error) {
	var objects portsObjects
	if err := loadPortsObjects(&objects, nil); err != nil {
		if errors.Is(err, os.ErrPermission) {
			return nil, fmt.Errorf("asked ports: %w: run as root, or with CAP_BPF and CAP_PERFMON", os.ErrPermission)
		}
		return nil, fmt.Errorf("asked ports: load program: %w", err)
	}
	defer objects.Close()
	ports := map[LocalPort]bool{}
	for _, program := range []*ebpf.Program{objects.PortsTcp, objects.PortsUdp} {
		if err := iterate(program, ports); err != nil {
			return nil, fmt.Errorf("asked ports: %w", err)
		}
	}
	return ports, nil
}

// iterate runs a program over the sockets that it is for.
func iterate(program *ebpf.Program, ports map[LocalPort]bool) error {
	attached, err := link.AttachIter(link.IterOptions{Program: program})
	if err != nil {
		return err
	}
	defer attached.Close()
	records, err := attached.Open()
	if err != nil {
		return err
	}
	defer records.Close()
	for list := bufio.NewReader(records); ; {
		var asked portsAskedPort
		err := binary.Read(list, binary.NativeEndian, &asked)
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
		ports[LocalPort{flow.Protocol(asked.Protocol), asked.Port}] = true
	}
}
