// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/google/nftables"
	mdnetlink "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// errInterrupted reports that the rules changed during the read.
var errInterrupted = errors.New("the rules were changed while they were read")

// answerWithin bounds the wait for one answer of the kernel.
const answerWithin = 10 * time.Second

// nfgenBytes is the size of struct nfgenmsg, the header of every nf_tables message.
const nfgenBytes = 4

// dump requests all nf_tables objects of a kind (NFT_MSG_GET*) in the calling thread's namespace. It calls visit with
// the family and the attributes of each object. Family 0 means all families. An error of visit ends the dump.
func dump(kind int, family nftables.TableFamily, filter []mdnetlink.Attribute, visit func(nftables.TableFamily, *mdnetlink.AttributeDecoder) error) error {
	attributes, err := mdnetlink.MarshalAttributes(filter)
	if err != nil {
		return err
	}
	request, err := (&mdnetlink.Message{Header: mdnetlink.Header{
		Length: uint32(unix.SizeofNlMsghdr + nfgenBytes + len(attributes)), Type: mdnetlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | kind),
		Flags: mdnetlink.Request | mdnetlink.Dump, Sequence: 1,
	}, Data: slices.Concat([]byte{byte(family), 0, 0, 0}, attributes)}).MarshalBinary()
	if err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	wait := unix.NsecToTimeval(answerWithin.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait); err != nil {
		return os.NewSyscallError("setsockopt", err)
	}
	if err := unix.Sendto(fd, request, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return os.NewSyscallError("sendto", err)
	}
	for buffer := make([]byte, 64<<10); ; { // an answer has at most 32 KiB
		n, _, err := unix.Recvfrom(fd, buffer, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return os.NewSyscallError("recvfrom", err)
		}
		if done, err := eachMessage(buffer[:n], visit); done || err != nil {
			return err
		}
	}
}

// eachMessage visits the messages of one answer. done reports that the dump is complete.
func eachMessage(answer []byte, visit func(nftables.TableFamily, *mdnetlink.AttributeDecoder) error) (done bool, err error) {
	messages, err := syscall.ParseNetlinkMessage(answer)
	if err != nil {
		return false, err
	}
	for _, m := range messages {
		switch {
		case m.Header.Flags&unix.NLM_F_DUMP_INTR != 0:
			return false, errInterrupted
		case m.Header.Type == unix.NLMSG_DONE:
			return true, nil
		case m.Header.Type == unix.NLMSG_ERROR && len(m.Data) >= 4:
			return false, unix.Errno(-int32(binary.NativeEndian.Uint32(m.Data)))
		case len(m.Data) < nfgenBytes:
			return false, unix.EPROTO
		}
		a, err := mdnetlink.NewAttributeDecoder(m.Data[nfgenBytes:])
		if err != nil {
			return false, err
		}
		a.ByteOrder = binary.BigEndian
		if err := errors.Join(visit(nftables.TableFamily(m.Data[0]), a), a.Err()); err != nil {
			return false, err
		}
	}
	return false, nil
}

// Generation returns a number that every nf_tables transaction increments.
func Generation() (uint32, error) {
	conn, err := mdnetlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	messages, err := conn.Execute(mdnetlink.Message{
		Header: mdnetlink.Header{Type: mdnetlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETGEN), Flags: mdnetlink.Request},
		Data:   []byte{unix.AF_UNSPEC, 0, 0, 0},
	})
	if err != nil || len(messages) == 0 || len(messages[0].Data) < nfgenBytes {
		return 0, fmt.Errorf("nftables generation: %w", err)
	}
	attributes, err := mdnetlink.NewAttributeDecoder(messages[0].Data[nfgenBytes:])
	if err != nil {
		return 0, err
	}
	attributes.ByteOrder = binary.BigEndian
	for attributes.Next() {
		if attributes.Type() == unix.NFTA_GEN_ID {
			return attributes.Uint32(), nil
		}
	}
	return 0, attributes.Err()
}
