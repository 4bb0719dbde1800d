from headway.cli import main

raise SystemExit(main())
