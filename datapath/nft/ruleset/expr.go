// SPDX-License-Identifier: Apache-2.0

package ruleset

import (
	"golang.org/x/sys/unix"
)

// Attributes without a name in golang.org/x/sys/unix; numbers of include/uapi/linux/netfilter/nf_tables.h.
const (
	fwdSregDev, fwdSregAddr, fwdNFProto = 1, 2, 3
	tproxyFamily, tproxyPort            = 1, 3
	fibDreg, fibResult, fibFlags        = 1, 2, 3
	fibAddressType, fibDaddr            = 3, 2 // NFT_FIB_RESULT_ADDRTYPE, NFTA_FIB_F_DADDR
	connlimitCount, connlimitFlags      = 1, 2
	dynsetExpr                          = unix.NFTA_DYNSET_EXPR
	flowTableName                       = 1
	natFlags                            = unix.NFTA_NAT_FLAGS
	metaProtocolIP, metaProtocolIP6     = 0x0800, 0x86dd
)

// register returns the kernel's number of the i-th 32-bit register, in the form of the kernel's reports.
func register(i int) uint32 {
	if i%4 == 0 {
		return uint32(unix.NFT_REG_1 + i/4)
	}
	return uint32(unix.NFT_REG32_00 + i)
}

// expr appends one expression: its name and its attributes.
func (a *Attrs) expr(name string, fill func(*Attrs)) {
	elem := a.Nest(unix.NFTA_LIST_ELEM)
	a.String(unix.NFTA_EXPR_NAME, name)
	if fill != nil {
		data := a.Nest(unix.NFTA_EXPR_DATA)
		fill(a)
		a.Close(data)
	}
	a.Close(elem)
}

func (a *Attrs) payloadLoad(base, offset, length uint32, dst int) {
	a.expr("payload", func(a *Attrs) {
		a.Uint32(unix.NFTA_PAYLOAD_DREG, register(dst))
		a.Uint32(unix.NFTA_PAYLOAD_BASE, base)
		a.Uint32(unix.NFTA_PAYLOAD_OFFSET, offset)
		a.Uint32(unix.NFTA_PAYLOAD_LEN, length)
	})
}

// checksum selects the checksums that the kernel updates with a header field.
type checksum struct {
	kind   uint32 // NFT_PAYLOAD_CSUM_*.
	offset uint32 // of the checksum, from the same base
	pseudo bool   // The field is part of the pseudo header of layer 4.
}

func (a *Attrs) payloadStore(base, offset, length uint32, src int, c checksum) {
	a.expr("payload", func(a *Attrs) {
		a.Uint32(unix.NFTA_PAYLOAD_BASE, base)
		a.Uint32(unix.NFTA_PAYLOAD_OFFSET, offset)
		a.Uint32(unix.NFTA_PAYLOAD_LEN, length)
		a.Uint32(unix.NFTA_PAYLOAD_SREG, register(src))
		a.Uint32(unix.NFTA_PAYLOAD_CSUM_TYPE, c.kind)
		a.Uint32(unix.NFTA_PAYLOAD_CSUM_OFFSET, c.offset)
		if c.pseudo {
			a.Uint32(unix.NFTA_PAYLOAD_CSUM_FLAGS, unix.NFT_PAYLOAD_L4CSUM_PSEUDOHDR)
		}
	})
}

func (a *Attrs) metaLoad(key uint32, dst int) {
	a.expr("meta", func(a *Attrs) {
		a.Uint32(unix.NFTA_META_DREG, register(dst))
		a.Uint32(unix.NFTA_META_KEY, key)
	})
}

func (a *Attrs) metaStore(key uint32, src int) {
	a.expr("meta", func(a *Attrs) {
		a.Uint32(unix.NFTA_META_KEY, key)
		a.Uint32(unix.NFTA_META_SREG, register(src))
	})
}

// ctLoad loads a field of the connection. A negative direction means none.
func (a *Attrs) ctLoad(key uint32, direction int, dst int) {
	a.expr("ct", func(a *Attrs) {
		a.Uint32(unix.NFTA_CT_DREG, register(dst))
		a.Uint32(unix.NFTA_CT_KEY, key)
		if direction >= 0 {
			a.Uint8(unix.NFTA_CT_DIRECTION, uint8(direction))
		}
	})
}

func (a *Attrs) ctStore(key uint32, src int) {
	a.expr("ct", func(a *Attrs) {
		a.Uint32(unix.NFTA_CT_KEY, key)
		a.Uint32(unix.NFTA_CT_SREG, register(src))
	})
}

func (a *Attrs) data(kind uint16, raw string) {
	n := a.Nest(kind)
	a.Raw(unix.NFTA_DATA_VALUE, raw)
	a.Close(n)
}

// VerdictData appends a verdict as a data attribute.
func (a *Attrs) VerdictData(kind uint16, v Verdict) {
	n := a.Nest(kind)
	m := a.Nest(unix.NFTA_DATA_VERDICT)
	a.Uint32(unix.NFTA_VERDICT_CODE, uint32(v.Code))
	if v.Chain != "" {
		a.String(unix.NFTA_VERDICT_CHAIN, v.Chain)
	}
	a.Close(m)
	a.Close(n)
}

// ValueData appends a plain value as a data attribute.
func (a *Attrs) ValueData(kind uint16, raw string) { a.data(kind, raw) }

func (a *Attrs) immediate(dst int, raw string) {
	a.expr("immediate", func(a *Attrs) {
		a.Uint32(unix.NFTA_IMMEDIATE_DREG, register(dst))
		a.data(unix.NFTA_IMMEDIATE_DATA, raw)
	})
}

func (a *Attrs) verdict(v Verdict) {
	a.expr("immediate", func(a *Attrs) {
		a.Uint32(unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_VERDICT)
		a.VerdictData(unix.NFTA_IMMEDIATE_DATA, v)
	})
}

func (a *Attrs) cmp(op uint32, src int, raw string) {
	a.expr("cmp", func(a *Attrs) {
		a.Uint32(unix.NFTA_CMP_SREG, register(src))
		a.Uint32(unix.NFTA_CMP_OP, op)
		a.data(unix.NFTA_CMP_DATA, raw)
	})
}

func (a *Attrs) rangeOf(op uint32, src int, first, last string) {
	a.expr("range", func(a *Attrs) {
		a.Uint32(unix.NFTA_RANGE_SREG, register(src))
		a.Uint32(unix.NFTA_RANGE_OP, op)
		a.data(unix.NFTA_RANGE_FROM_DATA, first)
		a.data(unix.NFTA_RANGE_TO_DATA, last)
	})
}

func (a *Attrs) bitwise(src, dst int, mask, xor string) {
	a.expr("bitwise", func(a *Attrs) {
		a.Uint32(unix.NFTA_BITWISE_SREG, register(src))
		a.Uint32(unix.NFTA_BITWISE_DREG, register(dst))
		a.Uint32(unix.NFTA_BITWISE_LEN, uint32(len(mask)))
		a.data(unix.NFTA_BITWISE_MASK, mask)
		a.data(unix.NFTA_BITWISE_XOR, xor)
	})
}

// lookupKind is the use of a lookup's result.
type lookupKind int

const (
	lookupMember  lookupKind = iota // Continue if the key is in the set.
	lookupMissing                   // Continue if it is not.
	lookupVerdict                   // Apply the verdict.
	lookupValue                     // Load the value.
)

func (a *Attrs) lookup(set string, src int, kind lookupKind, dst int) {
	a.expr("lookup", func(a *Attrs) {
		a.String(unix.NFTA_LOOKUP_SET, set)
		a.Uint32(unix.NFTA_LOOKUP_SREG, register(src))
		switch kind {
		case lookupVerdict:
			a.Uint32(unix.NFTA_LOOKUP_DREG, unix.NFT_REG_VERDICT)
		case lookupValue:
			a.Uint32(unix.NFTA_LOOKUP_DREG, register(dst))
		case lookupMissing:
			a.Uint32(unix.NFTA_LOOKUP_FLAGS, unix.NFT_LOOKUP_F_INV)
		}
	})
}

func (a *Attrs) numgen(kind uint32, s Slots, dst int) {
	a.expr("numgen", func(a *Attrs) {
		a.Uint32(unix.NFTA_NG_DREG, register(dst))
		a.Uint32(unix.NFTA_NG_MODULUS, uint32(s.Count))
		a.Uint32(unix.NFTA_NG_TYPE, kind)
		a.Uint32(unix.NFTA_NG_OFFSET, s.First)
	})
}

func (a *Attrs) hash(src, length int, s Slots, seed uint32, dst int) {
	a.expr("hash", func(a *Attrs) {
		a.Uint32(unix.NFTA_HASH_SREG, register(src))
		a.Uint32(unix.NFTA_HASH_DREG, register(dst))
		a.Uint32(unix.NFTA_HASH_LEN, uint32(length))
		a.Uint32(unix.NFTA_HASH_MODULUS, uint32(s.Count))
		a.Uint32(unix.NFTA_HASH_SEED, seed)
		if s.First != 0 {
			a.Uint32(unix.NFTA_HASH_OFFSET, s.First)
		}
		a.Uint32(unix.NFTA_HASH_TYPE, unix.NFT_HASH_JENKINS)
	})
}
