// SPDX-License-Identifier: Apache-2.0

package bench

func datapathPacketRows() []Row { return nil }

func datapathFlowRows() []Row { return nil }
