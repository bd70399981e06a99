// SPDX-License-Identifier: Apache-2.0

package nfnl

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/datapath/nft/ruleset"
)

// Names missing in golang.org/x/sys/unix; numbers of include/uapi/linux/netfilter/nf_tables.h.
const (
	setElemKeyEnd                                              = 10 // NFTA_SET_ELEM_KEY_END.
	setExpr                                                    = 17 // NFTA_SET_EXPR.
	setFlagConcat                                              = 0x80
	setDescConcat                                              = 2
	setFieldLen                                                = 1
	dataVerdict                                                = 0xffffff00 // NFT_DATA_VERDICT
	ctHelperFamily                                             = unix.NFTA_CT_HELPER_L3PROTO
	ctTimeoutFamily, ctTimeoutProtocol, ctTimeoutData          = 1, 2, 3 // NFTA_CT_TIMEOUT_*.
	flowtableTable, flowtableName, flowtableHook               = 1, 2, 3 // NFTA_FLOWTABLE_*.
	flowtableHookNum, flowtableHookPriority, flowtableHookDevs = 1, 2, 3 // NFTA_FLOWTABLE_HOOK_*.
	deviceName                                                 = 1       // NFTA_DEVICE_NAME.
	userComment                                                = 0       // NFTNL_UDATA_RULE_COMMENT, nft's convention for userdata.
)

// Refusal is the kernel's error for one object of a transaction.
type Refusal struct {
	Owner  string // Service or rule, in words; empty for shared objects.
	Object string // The requested operation.
	Errno  unix.Errno
	Detail string // the kernel's own message, often empty
	// Made is the refused object, if any.
	Made *ruleset.Object
}

// Error names the owner, the object and the kernel's reason.
func (r *Refusal) Error() string {
	text := ""
	if r.Owner != "" {
		text = r.Owner + ": "
	}
	text += r.Object + ": the kernel refuses it: " + r.Errno.Error()
	switch lacks := r.Made != nil && (r.Errno == unix.ENOENT || r.Errno == unix.EOPNOTSUPP); {
	case lacks && r.Made.Kind == ruleset.ObjectFlowtable:
		text += " (it has no flowtables: CONFIG_NF_FLOW_TABLE)"
	case lacks && r.Made.Kind == ruleset.ObjectHelper:
		text += " (it has no such helper: load the module nf_conntrack_" + r.Made.Helper + ")"
	}
	if r.Detail != "" {
		text += " (" + r.Detail + ")"
	}
	return text
}

// Unwrap returns the error number.
func (r *Refusal) Unwrap() error { return r.Errno }

// sentMessage describes one message of a transaction.
type sentMessage struct {
	owner, object string
	elements      []ruleset.Item[ruleset.Element]
	offsets       []int // of each element's attribute, from the message's start
	set           *ruleset.Set
	made          *ruleset.Object
}

// batch is a transaction during encoding.
type batch struct {
	buf   []byte
	first uint32 // sequence number of log[0]
	seq   uint32
	log   []sentMessage
	last  int // start of the last message
}

// maxElements is the maximum size in bytes of the elements in one message: an attribute is at most 64 KiB long.
const maxElements = 60 << 10

func (b *batch) begin(msg int, flags uint16, f ruleset.Family, what sentMessage) (ruleset.Attrs, int) {
	b.seq++
	b.log = append(b.log, what)
	buf, start := message(b.buf, kind(msg), unix.NLM_F_REQUEST|flags, uint8(f), b.seq)
	b.last = start
	return ruleset.Attrs(buf), start
}

func (b *batch) end(a ruleset.Attrs, start int) { b.buf = finishMessage(a, start) }

// Apply writes the delta in one transaction. It writes everything, or nothing and returns an error, possibly a
// *Refusal or an error that wraps one.
func (c *Conn) Apply(d *ruleset.Delta) error {
	if d.Empty() {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	b := &batch{buf: make([]byte, 0, 64<<10+estimate(d)), seq: c.seq}
	control := func(msg int) {
		b.seq++
		buf, start := message(b.buf, uint16(msg), unix.NLM_F_REQUEST, unix.AF_UNSPEC, b.seq)
		binary.BigEndian.PutUint16(buf[start+nlHeader+2:], unix.NFNL_SUBSYS_NFTABLES)
		b.buf = finishMessage(buf, start)
	}
	control(unix.NFNL_MSG_BATCH_BEGIN)
	begin := b.seq
	b.first = b.seq + 1
	b.delta(d)
	lastSeq := b.seq
	binary.NativeEndian.PutUint16(b.buf[b.last+6:], binary.NativeEndian.Uint16(b.buf[b.last+6:])|unix.NLM_F_ACK)
	control(unix.NFNL_MSG_BATCH_END)
	c.seq = b.seq
	if err := c.raiseSendBuffer(len(b.buf)); err != nil {
		return err
	}
	if err := unix.Sendto(c.fd, b.buf, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return Explain(err)
	}
	return c.verdict(b, begin, lastSeq)
}

// Makes reports whether the kernel can create an object. The transaction creates it and then fails on purpose, so it
// never takes effect.
func (c *Conn) Makes(o *ruleset.Object) (bool, error) {
	return c.acceptsDelta(&ruleset.Delta{
		AddTables:  []ruleset.Family{o.Table},
		AddObjects: []ruleset.Item[*ruleset.Object]{{Owner: probe, Of: o}},
	})
}

// Takes reports in the same way whether the kernel accepts a chain with its rules.
func (c *Conn) Takes(chain *ruleset.Chain) (bool, error) {
	item := []ruleset.Item[*ruleset.Chain]{{Owner: probe, Of: chain}}
	return c.acceptsDelta(&ruleset.Delta{AddTables: []ruleset.Family{chain.Table}, AddChains: item, AddRules: item})
}

// probe is the owner of objects in a trial transaction.
const probe = "probe"

// acceptsDelta reports whether the kernel accepts a delta owned by probe. The transaction also removes a nonexistent set,
// which the kernel always refuses.
func (c *Conn) acceptsDelta(d *ruleset.Delta) (bool, error) {
	d.DelSets = []ruleset.Item[*ruleset.Set]{{Of: &ruleset.Set{ID: ruleset.ID{Table: d.AddTables[0], Name: "probe"}}}}
	err := c.Apply(d)
	refusals, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return false, err
	}
	for _, err := range refusals.Unwrap() {
		var r *Refusal
		if !errors.As(err, &r) {
			return false, err
		}
		if r.Owner == probe {
			return false, nil
		}
	}
	return true, nil
}

// estimate estimates the size of a transaction, to avoid growing its buffer.
func estimate(d *ruleset.Delta) int {
	return 120*(len(d.AddChains)+len(d.AddSets)) + 400*len(d.AddRules) + 110*(len(d.AddElements)+len(d.DelElements))
}

// verdict reads the kernel's answers. The kernel has queued all answers when the send returns.
func (c *Conn) verdict(b *batch, begin, lastSeq uint32) error {
	var refusals []error
	acked := false
	for {
		data, err := c.receive(unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EAGAIN) {
			break
		}
		if errors.Is(err, unix.ENOBUFS) {
			refusals = append(refusals, errors.New("nf_tables: more refusals than the socket holds"))
			break
		}
		if err != nil {
			return fmt.Errorf("nf_tables: answer to the transaction: %w", err)
		}
		for {
			m, rest, ok := nextMessage(data)
			if !ok {
				break
			}
			data = rest
			if m.kind != unix.NLMSG_ERROR {
				continue
			}
			switch errno := errnoOf(m.body); {
			case errno == 0 && m.seq == lastSeq:
				acked = true
			case errno != 0 && m.seq == begin:
				refusals = append(refusals, Explain(errno))
			case errno != 0 && len(refusals) < 20:
				refusals = append(refusals, b.messageError(m, errno))
			}
		}
	}
	if len(refusals) > 0 {
		return errors.Join(refusals...)
	}
	if !acked {
		return errors.New("nf_tables: the kernel did not acknowledge the transaction")
	}
	return nil
}

// messageError builds the error for a refused message from the extended acknowledgement, which contains a text and the
// offset of the offending attribute.
func (b *batch) messageError(m netlinkMessage, errno unix.Errno) error {
	r := &Refusal{Object: "transaction", Errno: errno}
	offset := 0
	if len(m.body) >= 4+nlHeader {
		attrs := m.body[4+nlHeader:]
		for {
			k, _, v, rest, ok := ruleset.NextAttr(attrs)
			if !ok {
				break
			}
			attrs = rest
			switch {
			case k == unix.NLMSGERR_ATTR_MSG:
				r.Detail = cstring(v)
			case k == unix.NLMSGERR_ATTR_OFFS && len(v) >= 4:
				offset = int(binary.NativeEndian.Uint32(v))
			}
		}
	}
	if i := int(m.seq - b.first); i >= 0 && i < len(b.log) {
		s := b.log[i]
		r.Owner, r.Object, r.Made = s.owner, s.object, s.made
		if e := s.elementAt(offset); e != nil {
			r.Owner = e.Owner
			r.Object += " { " + s.set.Element(e.Of) + " }"
		}
	}
	return r
}

// elementAt returns the element with the netlink attribute at the offset in bytes.
func (s *sentMessage) elementAt(offset int) *ruleset.Item[ruleset.Element] {
	if len(s.elements) == 1 {
		return &s.elements[0]
	}
	if offset == 0 {
		return nil
	}
	for i := len(s.offsets) - 1; i >= 0; i-- {
		if s.offsets[i] <= offset {
			return &s.elements[i]
		}
	}
	return nil
}
