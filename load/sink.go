// SPDX-License-Identifier: Apache-2.0

package load

import (
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"
)

// SinkOptions selects checks of the far end in addition to the counters.
type SinkOptions struct {
	// Checksums verifies the checksums of the IPv4 header and of the transport.
	Checksums bool
	// Stamps reads sequence numbers and times from the payloads. The sequence is valid if all packets of one sending
	// CPU arrive at one CPU, as on veth links.
	Stamps bool
}

// Received holds the counters of the far end since its attachment.
type Received struct {
	Packets        uint64 `json:"packets"`
	Bytes          uint64 `json:"bytes"` // bytes of the frames, without FCS
	BadIPChecksum  uint64 `json:"bad_ip_checksum"`
	BadL4Checksum  uint64 `json:"bad_l4_checksum"`
	Fragments      uint64 `json:"fragments"` // Packets of datagrams that could not be checked.
	Unchecked      uint64 `json:"unchecked"` // Packets of protocols other than TCP, UDP and ICMP.
	Unstamped      uint64 `json:"unstamped"` // Packets without an expected stamp.
	SequenceLost   uint64 `json:"sequence_lost"`
	SequenceLate   uint64 `json:"sequence_late"`
	PassedToKernel uint64 `json:"passed_to_kernel"` // packets that are not test traffic
}

// Sink counts and drops the packets that one or more interfaces receive.
type Sink struct {
	objects *sinkObjects
	links   []link.Link
	// Counters at the last Reset: the program continues with its expected sequence numbers.
	lostBefore, lateBefore uint64
}

// NewSink loads the far end's program. Attach attaches it to interfaces.
func NewSink(o SinkOptions) (*Sink, error) {
	if err := rlimit.RemoveMemlock(); err != nil {
		return nil, fmt.Errorf("sink: memory limit: %w", err)
	}
	collection, err := loadSink()
	if err != nil {
		return nil, err
	}
	settings := [2]uint32{}
	if o.Checksums {
		settings[0] = 1
	}
	if o.Stamps {
		settings[1] = 1
	}
	if err := collection.Variables["settings"].Set(settings); err != nil {
		return nil, fmt.Errorf("sink: settings: %w", err)
	}
	s := &Sink{objects: new(sinkObjects)}
	if err := collection.LoadAndAssign(s.objects, nil); err != nil {
		return nil, fmt.Errorf("sink: load program: %w", err)
	}
	return s, nil
}

// Attach attaches the far end to an interface with native XDP.
func (s *Sink) Attach(netns Namespace, iface string) error {
	l, err := attachXDP(netns, iface, s.objects.LoadSink)
	if err != nil {
		return err
	}
	s.links = append(s.links, l)
	return nil
}

func attachXDP(netns Namespace, iface string, prog *ebpf.Program) (link.Link, error) {
	return attach(netns, iface, "XDP in driver mode", func(index int) (link.Link, error) {
		return link.AttachXDP(link.XDPOptions{Program: prog, Interface: index, Flags: link.XDPDriverMode})
	})
}

// attachTC attaches a program to the interface's TC ingress (TCX, Linux 6.6).
func attachTC(netns Namespace, iface string, prog *ebpf.Program) (link.Link, error) {
	return attach(netns, iface, "TCX", func(index int) (link.Link, error) {
		return link.AttachTCX(link.TCXOptions{Program: prog, Interface: index, Attach: ebpf.AttachTCXIngress})
	})
}

func attach(netns Namespace, iface, how string, to func(index int) (link.Link, error)) (link.Link, error) {
	var l link.Link
	err := netns.Do(func() error {
		i, err := net.InterfaceByName(iface)
		if err != nil {
			return fmt.Errorf("interface %s: %w", iface, err)
		}
		if l, err = to(i.Index); errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("interface %s: attach %s: another program is there, of a gateway or of another run: end that first: %w", iface, how, err)
		} else if err != nil {
			return fmt.Errorf("interface %s: attach %s: %w", iface, how, err)
		}
		return nil
	})
	return l, err
}

// Read returns the counters.
func (s *Sink) Read() (Received, error) {
	r, err := s.readAll()
	r.SequenceLost -= min(r.SequenceLost, s.lostBefore) // it decreases when late packets arrive
	r.SequenceLate -= s.lateBefore
	return r, err
}

// Await returns the counters after so many packets have arrived, or when no more arrive, because sent packets may
// still be queued. It takes five seconds at most.
func (s *Sink) Await(packets uint64) (Received, error) {
	return s.awaitSilence(packets, 500*time.Millisecond, 5*time.Second)
}

// awaitSilence returns when no packet arrives within patience, or at the bound.
func (s *Sink) awaitSilence(packets uint64, patience, bound time.Duration) (Received, error) {
	const pause = 5 * time.Millisecond
	begin := time.Now()
	last, changed := uint64(0), begin
	for {
		r, err := s.Read()
		if err != nil || r.Packets >= packets || time.Since(begin) > bound {
			return r, err
		}
		if r.Packets != last {
			last, changed = r.Packets, time.Now()
		} else if time.Since(changed) > patience {
			return r, nil
		}
		time.Sleep(pause)
	}
}

// readAll reads the counters since the load of the programs, or since Reset for the counters that Reset clears.
func (s *Sink) readAll() (Received, error) {
	var perCPU []sinkReceived
	var r Received
	if err := s.objects.LoadReceived.Lookup(uint32(0), &perCPU); err != nil {
		return r, fmt.Errorf("sink: counters: %w", err)
	}
	for _, c := range perCPU {
		r.Packets += c.Packets
		r.Bytes += c.Bytes
		r.BadIPChecksum += c.BadIpChecksum
		r.BadL4Checksum += c.BadL4Checksum
		r.Fragments += c.Fragments
		r.Unchecked += c.Unchecked
		r.Unstamped += c.Unstamped
		r.PassedToKernel += c.Passed
	}
	for i := range s.objects.LoadSequence.MaxEntries() {
		var q sinkSequence
		if err := s.objects.LoadSequence.Lookup(i, &q); err != nil {
			return r, fmt.Errorf("sink: sequence numbers: %w", err)
		}
		r.SequenceLost += q.Lost
		r.SequenceLate += q.Late
	}
	return r, nil
}

// ByCPU returns the number of packets received on each CPU. The kernel may have moved the receive side of a link away
// from the sender's CPU.
func (s *Sink) ByCPU() ([]uint64, error) {
	var perCPU []sinkReceived
	if err := s.objects.LoadReceived.Lookup(uint32(0), &perCPU); err != nil {
		return nil, fmt.Errorf("sink: counters: %w", err)
	}
	packets := make([]uint64, len(perCPU))
	for cpu, c := range perCPU {
		packets[cpu] = c.Packets
	}
	return packets, nil
}

// Latency returns the distribution of the time from stamp to arrival.
func (s *Sink) Latency() (*Histogram, error) { return readHistogram(s.objects.LoadLatency) }

func readHistogram(m *ebpf.Map) (*Histogram, error) {
	h := new(Histogram)
	keys, values := make([]uint32, histBuckets), make([]uint64, histBuckets*ebpf.MustPossibleCPU())
	var cursor ebpf.MapBatchCursor
	n, err := m.BatchLookup(&cursor, keys, values, nil)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil, fmt.Errorf("histogram: %w", err)
	}
	cpus := len(values) / len(keys)
	for i, b := range keys[:n] {
		for _, c := range values[i*cpus : (i+1)*cpus] {
			if c > 0 {
				h.add(int(b), c)
			}
		}
	}
	return h, nil
}

// Reset sets all counters to zero.
func (s *Sink) Reset() error {
	before, err := s.readAll()
	if err != nil {
		return err
	}
	s.lostBefore, s.lateBefore = before.SequenceLost, before.SequenceLate
	zero := make([]sinkReceived, ebpf.MustPossibleCPU())
	if err := s.objects.LoadReceived.Put(uint32(0), zero); err != nil {
		return fmt.Errorf("sink: reset: %w", err)
	}
	none := make([]uint64, ebpf.MustPossibleCPU())
	for b := range uint32(histBuckets) {
		if err := s.objects.LoadLatency.Put(b, none); err != nil {
			return fmt.Errorf("sink: reset: %w", err)
		}
	}
	return nil
}

// Close detaches and unloads.
func (s *Sink) Close() error {
	var errs []error
	for _, l := range s.links {
		errs = append(errs, l.Close())
	}
	s.links = nil
	return errors.Join(append(errs, s.objects.Close())...)
}
