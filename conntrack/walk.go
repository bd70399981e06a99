// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/kernel"
	"github.com/sluice-lb/sluice/netdev"
)

// walkedEntries is the number of entries from which Walk is faster than a dump: the programs take a tenth of a second
// to load.
const walkedEntries = 50_000

// walkedLoad is the largest number of entries per bucket. read_buckets has room for chains of 256 entries, and the
// lengths of chains vary.
const walkedLoad = 16

// bucketsPerRun limits one run of read_buckets, which the kernel does not interrupt.
const bucketsPerRun = 512

// walker reads the kernel's hash table with the programs of bpf/conntrack.
type walker struct {
	objects walkObjects
	chunks  []walkChunk // shared with the programs
	memory  []byte
	buckets uint32
	inode   uint32 // of the network namespace
}

// Walk calls visit for each entry of ns, as Dump does, but reads the kernel's hash table with a program. Identifiers,
// counters and timestamps are zero. ErrInterrupted means that single entries may be missing. started reports whether
// entries were read before an error; otherwise Dump can take over.
func Walk(ctx context.Context, ns netdev.Namespace, visit func(*Entry) error) (started bool, err error) {
	w, err := openWalker(ctx, ns)
	if err != nil {
		return false, fmt.Errorf("walk through the connection table: %w", err)
	}
	defer w.close()
	return true, w.readAll(ctx, visit)
}

func openWalker(ctx context.Context, ns netdev.Namespace) (w *walker, err error) {
	limits, err := ReadLimits(ns)
	if err != nil {
		return nil, err
	}
	if limits.Buckets == 0 || limits.Count/limits.Buckets >= walkedLoad {
		return nil, fmt.Errorf("%d entries in %d buckets", limits.Count, limits.Buckets)
	}
	w = &walker{buckets: limits.Buckets}
	if w.inode, err = inodeOf(ns); err != nil {
		return nil, err
	}
	spec, err := loadWalk()
	if err != nil {
		return nil, err
	}
	if err := spec.Variables["hz"].Set(kernel.TicksPerSecond()); err != nil {
		return nil, err
	}
	err = spec.LoadAndAssign(&w.objects, nil)
	runtime.GC() // the kernel's type information takes some 6 MB
	if err != nil {
		return nil, err
	}
	if err := errors.Join(w.mapChunks(), w.findTable(ctx, ns)); err != nil {
		w.close()
		return nil, err
	}
	return w, nil
}

func (w *walker) close() {
	_ = unix.Munmap(w.memory)
	_ = w.objects.Close()
}

// inodeOf returns the inode number of a network namespace, by which the programs know it.
func inodeOf(ns netdev.Namespace) (inode uint32, err error) {
	err = ns.Do(func() error {
		var st unix.Stat_t
		err := unix.Stat("/proc/thread-self/ns/net", &st)
		inode = uint32(st.Ino)
		return err
	})
	return inode, err
}

func (w *walker) mapChunks() (err error) {
	n := int(w.objects.Chunks.MaxEntries())
	size := n * int(unsafe.Sizeof(walkChunk{}))
	page := os.Getpagesize()
	w.memory, err = unix.Mmap(w.objects.Chunks.FD(), 0, (size+page-1)/page*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("map %s: %w", w.objects.Chunks, err)
	}
	w.chunks = unsafe.Slice((*walkChunk)(unsafe.Pointer(unsafe.SliceData(w.memory))), n)
	return nil
}

var (
	errAnchored   = errors.New("a connection to start from was found")
	errUnanchored = errors.New("no TCP or UDP connection to start from")
)

// findTable finds the address of the hash table from one of its connections.
func (w *walker) findTable(ctx context.Context, ns netdev.Namespace) error {
	c, err := OpenIn(ns)
	if err != nil {
		return err
	}
	defer c.Close()
	result := errUnanchored
	err = c.Dump(ctx, nil, func(e *Entry) error {
		if e.Protocol != flow.TCP && e.Protocol != flow.UDP || e.Zone != 0 || e.Timeout < 2 {
			return nil
		}
		if result = w.findFrom(ns, e); result == nil {
			return errAnchored
		}
		return nil
	})
	if errors.Is(err, errAnchored) {
		return nil
	}
	return errors.Join(err, result)
}

// findFrom finds the table from one connection. The bucket is one of the places before it in its chain; only with the
// right one do other buckets contain their numbers.
func (w *walker) findFrom(ns netdev.Namespace, e *Entry) error {
	if err := w.objects.Anchor.Set(anchorOf(e)); err != nil {
		return err
	}
	if err := ns.Do(func() error { return run(w.objects.FindTable, 0) }); err != nil {
		return err
	}
	var bucket, places uint32
	place := make([]uint64, w.objects.Place.Size()/8)
	err := errors.Join(w.objects.FoundBucket.Get(&bucket), w.objects.Places.Get(&places), w.objects.Place.Get(place))
	if err != nil {
		return err
	}
	for _, at := range place[:min(int(places), len(place))] {
		if err := w.objects.Table.Set(at - 8*uint64(bucket)); err != nil {
			return err
		}
		good := true
		for _, other := range []uint32{bucket ^ 1, bucket ^ 2, 0, w.buckets - 1} {
			if other >= w.buckets {
				continue
			}
			c := &w.chunks[0]
			c.Bucket, c.End, c.Namespace = other, other+1, 0
			if err := run(w.objects.ReadBuckets, 0); err != nil {
				return err
			}
			good = good && c.Failed == 0 && c.Bucket == c.End
		}
		if good {
			return nil
		}
	}
	return fmt.Errorf("no place of %d is bucket %d", places, bucket)
}

func anchorOf(e *Entry) (a walkConnection) {
	a.Protocol = uint32(e.Protocol)
	put := func(words []byte, from Addr) []byte { return append(words, from[:]...) }
	if e.Family == unix.AF_INET {
		put = func(words []byte, from Addr) []byte { return append(words, from[12:]...) }
	}
	tuple := put(put(nil, e.Original.Source), e.Original.Dest)
	tuple = binary.BigEndian.AppendUint16(tuple, e.Original.SourcePort)
	tuple = binary.BigEndian.AppendUint16(tuple, e.Original.DestPort)
	a.Size = uint32(len(tuple))
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&a.Tuple)), unsafe.Sizeof(a.Tuple)), tuple)
	return a
}

// run runs a program once, with the number of a chunk in its packet.
func run(p *ebpf.Program, chunk uint32) error {
	packet := make([]byte, 64)
	host.PutUint32(packet, chunk)
	_, err := p.Run(&ebpf.RunOptions{Data: packet})
	return err
}

// filledChunk is a chunk of entries on its way to visit.
type filledChunk struct {
	number uint32
	err    error
}

// readAll reads the buckets on other goroutines and visits the entries on the caller's.
func (w *walker) readAll(ctx context.Context, visit func(*Entry) error) (result error) {
	free := make(chan uint32, len(w.chunks))
	filled := make(chan filledChunk, len(w.chunks))
	for i := range w.chunks {
		free <- uint32(i)
	}
	ctx, stop := context.WithCancel(ctx)
	var next atomic.Uint32
	var readers sync.WaitGroup
	for range len(w.chunks) / 2 {
		readers.Go(func() { w.fill(ctx, &next, free, filled) })
	}
	go func() {
		readers.Wait()
		close(filled)
	}()
	defer func() {
		stop()
		for range filled { // until no goroutine uses the memory
		}
	}()
	var e Entry
	failed := uint32(0)
	for f := range filled {
		if f.err != nil {
			return f.err
		}
		c := &w.chunks[f.number]
		failed += c.Failed
		for i := range c.Record[:min(int(c.Records), len(c.Record))] {
			w.decode(&e, c, i)
			if err := visit(&e); err != nil {
				return err
			}
		}
		free <- f.number
	}
	now, err := readSetting(netdev.Namespace{}, "buckets")
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		return err
	case now != w.buckets || failed > w.buckets/100:
		return errors.New("the connection table was rebuilt while it was read")
	case failed > 0:
		return ErrInterrupted
	}
	return nil
}

// fill takes groups of buckets and runs the program until it has read each of them.
func (w *walker) fill(ctx context.Context, next *atomic.Uint32, free <-chan uint32, filled chan<- filledChunk) {
	for from, end := uint32(0), uint32(0); ; {
		if from == end {
			if end = next.Add(bucketsPerRun); end-bucketsPerRun >= w.buckets {
				return
			}
			from, end = end-bucketsPerRun, min(end, w.buckets)
		}
		f := filledChunk{}
		select {
		case <-ctx.Done():
			return
		case f.number = <-free:
		}
		c := &w.chunks[f.number]
		c.Bucket, c.End, c.Namespace = from, end, w.inode
		f.err = run(w.objects.ReadBuckets, f.number)
		if from == c.Bucket && f.err == nil {
			f.err = fmt.Errorf("bucket %d of %d could not be read", from, w.buckets)
		}
		from = c.Bucket
		filled <- f
		if f.err != nil {
			return
		}
	}
}

// decode fills e from the i-th record of a chunk.
func (w *walker) decode(e *Entry, c *walkChunk, i int) {
	r := &c.Record[i]
	*e = Entry{Family: uint8(r.Family), Protocol: flow.Protocol(r.Protocol), State: r.State, Zone: r.Zone,
		Status: Status(r.Status), Timeout: r.Seconds, Mark: r.Mark, Counted: r.Counted, Helped: r.Helped}
	for n, t := range []*Tuple{&e.Original, &e.Reply} {
		source, dest := &r.Source[n], &r.Dest[n]
		t.Source, t.Dest = addrOf(&source.Address, e.Family), addrOf(&dest.Address, e.Family)
		t.SourcePort, t.DestPort = source.Port, dest.Port
		if e.Protocol == flow.ICMP || e.Protocol == flow.ICMPv6 { // type and code take the place of the port
			t.ICMPType, t.ICMPCode, t.DestPort = uint8(t.DestPort>>8), uint8(t.DestPort), t.SourcePort
		}
	}
}

func addrOf(words *[4]uint32, family uint8) (a Addr) {
	if family == unix.AF_INET {
		a = mappedPrefix
		host.PutUint32(a[12:], words[0])
		return a
	}
	for i, word := range words {
		host.PutUint32(a[4*i:], word)
	}
	return a
}
