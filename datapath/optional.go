// SPDX-License-Identifier: Apache-2.0

package datapath

// A datapath may implement these interfaces too, and Attacher, Explainer and Mapper. The engine
// asks for each by a type assertion.

// Warner is a Datapath that knows why, on this host, the snapshot in force may not work.
type Warner interface {
	// Warnings returns one sentence for each cause, with the remedy.
	Warnings() []string
}

// Adopter is a Datapath that can take over what an earlier process left in the kernel.
type Adopter interface {
	// Left reports whether an earlier process left anything of Sluice's in the kernel.
	Left() (bool, error)
}

// ChangeDetector is a Datapath whose kernel objects other programs can change.
type ChangeDetector interface {
	// Touched reports whether another program changed or removed them since the last Apply.
	Touched() (bool, error)
}
