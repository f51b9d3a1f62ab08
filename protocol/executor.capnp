@0xd1a7c64e90b35f28;
# The wire schema between larderd and its executors.

using Cxx = import "/capnp/c++.capnp";
using Larder = import "larder.capnp";
$Cxx.namespace("larder::wire");

struct ExecutorCommand {
  union {
    addGroup @0 :AddGroup;          # fds: see executor_messages.h
    addSegments @1 :AddSegments;    # fds: one per size
    dropPool @2 :UInt64;
    addSession @3 :AddSession;      # fds: arena memfd, eventfd
    attachPool @4 :SessionPool;
    detachPool @5 :SessionPool;
    dropSession @6 :UInt64;
    drain @7 :Drain;
    copy @8 :CopyBlocks;
    dropExtent @9 :DropExtent;
    addImport @10 :AddImport;       # fds: the memory, where it has one
    dropImport @11 :SessionImport;
  }
}
struct SessionImport { session @0 :UInt64; import @1 :UInt64; }
struct AddImport {
  session @0 :UInt64;
  import @1 :UInt64;
  memory @2 :Larder.RegisterImport;
}
struct AddGroup {
  pool @0 :UInt64;
  group @1 :UInt32;
  spec @2 :Larder.GroupSpec;
  layout @3 :Larder.GroupLayout;
}
struct AddSegments {
  pool @0 :UInt64;
  group @1 :UInt32;
  sizeBytes @2 :List(Int64);
  firstIndex @3 :UInt32;            # position of the first one in the group's address range
}
struct DropExtent { pool @0 :UInt64; group @1 :UInt32; index @2 :UInt32; }
struct AddSession {
  session @0 :UInt64;
  arenaBytes @1 :UInt64;
  pools @2 :List(UInt64);           # open in it already: its ring is served from now on
}
struct SessionPool { session @0 :UInt64; pool @1 :UInt64; }
struct Drain { session @0 :UInt64; ticket @1 :UInt64; }
struct CopyBlocks {
  copy @0 :UInt64;
  pool @1 :UInt64;
  group @2 :UInt32;
  from @3 :List(Int32);
  to @4 :List(Int32);
}

struct ExecutorReport {
  union {
    ready @0 :Void;
    drained @1 :UInt64;             # ticket
    copied @2 :Copied;
    brokenRing @3 :BrokenRing;      # the session's ring indices make no sense
    imported @4 :Imported;
  }
}
struct Imported { session @0 :UInt64; import @1 :UInt64; error @2 :Larder.Error; }
struct Copied { copy @0 :UInt64; error @1 :Larder.Error; }
struct BrokenRing { session @0 :UInt64; message @1 :Text; }
